"""What the documentation shows: code blocks and inline code, each with its file and line.

A block is fenced and names its language: `sh` and `python` are run, `toml` is validated, `text`
is neither. Indented blocks are reported, so that no command escapes for want of a name.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
# Examples that need a download, and run in `make test-smollm2` (tests/examples) instead.
DOWNLOADS = ("examples/smollm2_reasoning_gym.toml",)
LANGUAGES = ("sh", "python", "toml", "text")

_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *(\S*) *")
_ITEM = re.compile(r" *([-*+]|\d+\.) ")
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:.|\n(?!\s*\n))+?)(?<!`)\1(?!`)")
# A command up to its comment; a `#` inside quotes or a word begins none.
_UNCOMMENTED = re.compile(r"""(?:[^\s'"#]#*|'[^']*'|"[^"]*"|\s(?!\s*#))*""")
_IN_HEADER = re.compile(r"(?:# {3}| *)((?:cd|dora-rl|make|pip|python) .*)")


@dataclass(frozen=True)
class Shown:
    """A piece of code, where it stands, and whether it is a whole command or a mention."""

    text: str
    file: str
    line: int
    whole: bool = True

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Block:
    language: str
    file: str
    line: int  # of its first line of code
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def commands(self) -> list[Shown]:
        """The commands of a `sh` block: continued lines joined, comments and blank lines gone."""
        found: list[Shown] = []
        begun, at = "", 0
        for number, line in enumerate(self.lines, self.line):
            at = at if begun else number
            begun += line
            if begun.endswith("\\"):
                begun = begun[:-1]
                continue
            text = uncommented(begun)
            begun = ""
            if text:
                found.append(Shown(text, self.file, at))
        return found


@dataclass
class Page:
    file: str
    blocks: list[Block] = field(default_factory=list)
    mentions: list[Shown] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]


def uncommented(line: str) -> str:
    found = _UNCOMMENTED.match(line)
    return " ".join(found[0].split()) if found else ""


def read_page(file: str, text: str) -> Page:
    """The blocks and the inline code of a Markdown page."""
    page, prose = Page(file), []
    fence: re.Match[str] | None = None
    begin, code = 0, list[str]()
    in_list, blank = False, True
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            if line.strip() == fence[2]:
                page.blocks.append(Block(fence[3], file, begin, tuple(code)))
                fence = None
            else:
                code.append(line.removeprefix(fence[1]))
            prose.append("")
            continue
        fence = _FENCE.fullmatch(line)
        if fence is not None:
            begin, code = number + 1, []
            if fence[3] not in LANGUAGES:
                page.problems.append(f"{file}:{number}: name the block's language: {LANGUAGES}")
        elif _ITEM.match(line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = in_list and not blank
        elif line.startswith("    ") and blank and not in_list:
            page.problems.append(f"{file}:{number}: indented block; fence it: {line.strip()}")
        blank = not line.strip()
        prose.append("" if fence else line)
    if fence is not None:
        page.problems.append(f"{file}:{begin - 1}: the block has no end")
    page.mentions.extend(_spans(file, "\n".join(prose)))
    return page


def _spans(file: str, prose: str) -> Iterator[Shown]:
    for span in _SPAN.finditer(prose):
        line = prose.count("\n", 0, span.start()) + 1
        yield Shown(" ".join(span[2].split()), file, line, whole=False)


def pages(root: Path = ROOT) -> list[Page]:
    """Every page for users and contributors."""
    names = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
    files = [root / name for name in names]
    files += sorted((root / "docs").rglob("*.md")) + sorted((root / "examples").rglob("*.md"))
    return [read_page(path.relative_to(root).as_posix(), path.read_text()) for path in files]


def headers(root: Path = ROOT) -> list[list[Shown]]:
    """The commands at the top of each example and of each script."""
    files = [*(root / "examples").rglob("*.toml"), *(root / "examples").rglob("*.py")]
    files += (root / "benchmarks").glob("*.py")
    return [_header(path, root) for path in sorted(files)]


def examples(root: Path = ROOT) -> list[Page]:
    """The commands at the top of each example as a page to run, from the root as they say."""
    shown = [found for found in headers(root) if found and found[0].file.startswith("examples/")]
    return [
        Page(found[0].file, [Block("sh", c.file, c.line, (c.text,)) for c in found])
        for found in shown
        if found[0].file not in DOWNLOADS
    ]


def _header(path: Path, root: Path) -> list[Shown]:
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    file = path.relative_to(root).as_posix()
    return [
        Shown(uncommented(found[1]), file, number)
        for number, line in enumerate(text.splitlines(), 1)
        if (found := _IN_HEADER.fullmatch(line))
    ]


def epilogs(command: click.Command, path: str) -> Iterator[list[Shown]]:
    """The examples at the end of `--help`, of a command and of those below it."""
    lines = (command.epilog or "").splitlines()
    yield [
        Shown(re.sub(r" +\(.*\)$", "", line.strip()), f"{path} --help", number)
        for number, line in enumerate(lines, 1)
        if re.match(r"  +(dora-rl|make) ", line)
    ]
    if isinstance(command, click.Group):
        ctx = click.Context(command, info_name=path)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None, name
            yield from epilogs(below, f"{path} {name}")
