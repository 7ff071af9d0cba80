"""Blocks and inline code are found, with file and line."""

import click
import pytest

from tests.docs.pages import Shown, epilogs, read_page, uncommented

PAGE = """# Title

Run `dora-rl train` or
`make
test`:

```sh
make quickstart    # with a comment
.venv/bin/dora-rl train \\
    --steps 2      # continued

# nothing here
cd examples
```

- an item

      of several paragraphs

```python
import dora_rl
```
"""


def test_commands_and_mentions_have_their_lines() -> None:
    page = read_page("a.md", PAGE)
    assert page.problems == []
    assert page.of("sh")[0].commands() == [
        Shown("make quickstart", "a.md", 8),
        Shown(".venv/bin/dora-rl train --steps 2", "a.md", 9),
        Shown("cd examples", "a.md", 13),
    ]
    assert page.mentions == [
        Shown("dora-rl train", "a.md", 3, whole=False),
        Shown("make test", "a.md", 4, whole=False),
    ]
    assert [block.line for block in page.of("python")] == [21]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("text\n\n    dora-rl train\n", "a.md:3: indented block"),
        ("```\ndora-rl train\n```\n", "a.md:1: name the block's language"),
        ("```bash\ndora-rl train\n```\n", "a.md:1: name the block's language"),
        ("\n```sh\ndora-rl train\n", "a.md:2: the block has no end"),
    ],
)
def test_a_block_that_cannot_be_told_is_reported(text: str, problem: str) -> None:
    (found,) = read_page("a.md", text).problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("make test  # all", "make test"),
        ("# all", ""),
        ("train --set 'a=#1' # b", "train --set 'a=#1'"),
        ("open page.md#part", "open page.md#part"),
    ],
)
def test_comments_go(line: str, command: str) -> None:
    assert uncommented(line) == command


def test_examples_of_help_are_found_in_every_command() -> None:
    group = click.Group("g", epilog="\b\nExamples:\n  dora-rl train\n\nMore.")
    group.add_command(click.Command("c", epilog="\b\n  dora-rl audit x   (then: look)"))
    assert list(epilogs(group, "g")) == [
        [Shown("dora-rl train", "g --help", 3)],
        [Shown("dora-rl audit x", "g c --help", 2)],
    ]
