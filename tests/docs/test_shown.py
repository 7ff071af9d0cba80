"""Every command that docs and `--help` show could be run; `make test-docs` runs those of docs."""

from collections.abc import Sequence

import pytest

from dora_rl import cli
from tests.docs import commands
from tests.docs.pages import ROOT, Page, Shown, epilogs, headers, pages

PAGES = pages()
EXAMPLES = [found for found in (*headers(), *epilogs(cli.cli, "dora-rl")) if found]


def listed(problems: Sequence[str]) -> str:
    return "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_blocks_can_be_run(page: Page) -> None:
    assert listed(commands.check_blocks(page)) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_what_is_mentioned_exists(page: Page) -> None:
    assert listed(commands.check_mentions(page)) == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0].file)
def test_examples_of_files_and_of_help_can_be_run(example: list[Shown]) -> None:
    assert listed(commands.check(example)) == ""


def test_every_command_has_examples() -> None:
    shown = {example[0].file for example in EXAMPLES}
    assert {f"dora-rl {name} --help" for name in cli.COMMANDS} <= shown


def test_what_ci_runs_by_itself_is_so() -> None:
    assert listed(commands.check_run_by_ci()) == ""


def test_ci_runs_the_rest() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test-docs" in lines
    shown = {shown.text for page in PAGES for block in page.of("sh") for shown in block.commands()}
    assert {"make quickstart", "make test", "dora-rl train"} <= shown  # nothing is passed over
    assert any(page.of("python") for page in PAGES)
