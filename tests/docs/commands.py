"""Whether a command that is shown could be run: its program, options, keys, targets and files.

Nothing is run here. `dora-rl` is parsed by its own click commands without invoking them, and the
values of `--set` are validated as the command would.
"""

import importlib.util
import io
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import click
from click.exceptions import Exit

from dora_rl import cli
from dora_rl.cli._training import quickstart_config
from dora_rl.config import load_toml, merged, validate
from dora_rl.config.shape import find_key
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.simulator.scenarios import Scenario, load_scenario
from tests.docs.pages import ROOT, Block, Page, Shown

# Commands that need not be run a second time, each with the line of .ci/run that runs it. All of
# `make` is here: a copy of the work tree has no environment of its own to install into.
RUN_BY_CI = {
    "make venv": "make venv",
    "make test": "make test",
    "make lint": "make lint &",
    "make test-slow": "make test-slow",
    "make test-portable": "make test-portable",
    "make test-docs": "make test-docs",
    "make test-smollm2": "make test-smollm2",
    "make test-vllm": "make test-vllm",
    "make test-ray": "make test-ray &",
    "make quickstart": "make quickstart",
    "dora-rl train": "make quickstart",
}

_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_EXTRAS = re.compile(r"(?:dora-rl|\.)\[([a-z0-9,-]+)\]")
_ENDS = {"|", "||", "&&", ";", "&"}
_OPEN = "…"  # a value that a mention leaves open


class Wrong(Exception):
    """The command cannot be run."""


def check(commands: Iterable[Shown], root: Path = ROOT) -> list[str]:
    """What is wrong with commands that follow each other in one shell, with file and line."""
    problems, directory = [], root
    for shown in commands:
        try:
            for words in simple_commands(shown.text):
                directory = _check_words(words, shown.whole, directory, root)
        except Wrong as error:
            problems.append(f"{shown.place}: {shown.text}: {error}")
    return problems


def check_mentions(page: Page, root: Path = ROOT) -> list[str]:
    """What is wrong with the inline code of a page that is a command, an option or an extra."""
    return [problem for shown in page.mentions for problem in _check_mention(shown, root)]


def check_blocks(page: Page, root: Path = ROOT) -> list[str]:
    """What is wrong with the blocks of a page."""
    problems = list(page.problems)
    for block in page.of("sh"):
        problems += check(block.commands(), root)
        problems += [
            f"{shown.place}: {shown.text}: not in RUN_BY_CI"
            for shown in block.commands()
            if "make" in shown.text.split() and shown.text not in RUN_BY_CI
        ]
    for block in page.of("toml"):
        try:
            check_toml(block)
        except (UserError, tomllib.TOMLDecodeError) as error:
            problems.append(f"{block.file}:{block.line}: {error}")
    try:
        compile(python_of(page), page.file, "exec")
    except SyntaxError as error:
        problems.append(f"{page.file}:{error.lineno}: {error.msg}")
    return problems


def check_run_by_ci(root: Path = ROOT) -> list[str]:
    """What is wrong with the table: every row must be true of .ci/run and of the Makefile."""
    lines = (root / ".ci" / "run").read_text().splitlines()
    recipes = _recipes((root / "Makefile").read_text())
    problems = [f".ci/run has no line `{line}`" for line in RUN_BY_CI.values() if line not in lines]
    for command, line in RUN_BY_CI.items():
        foreground = line.removesuffix(" &")
        recipe = recipes.get(foreground.removeprefix("make "))
        if recipe is None:
            problems.append(f"the Makefile has no target for `{line}`")
        elif command != foreground and f"$(BIN)/{command}" not in recipe:
            problems.append(f"`{line}` does not run `{command}`")
    return problems


def _recipes(makefile: str) -> dict[str, list[str]]:
    """The lines of every target."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in makefile.splitlines():
        target = re.match(r"([a-z0-9-]+):(?!=)", line)
        if target:
            lines = found.setdefault(target[1], [])
        elif line.startswith("\t"):
            lines.append(line.strip())
    return found


def python_of(page: Page) -> str:
    """The Python blocks of a page as one program, each line where it is on the page."""
    lines: list[str] = []
    for block in page.of("python"):
        lines += [""] * (block.line - 1 - len(lines)) + list(block.lines)
    return "\n".join(lines) + "\n"


def check_toml(block: Block) -> None:
    """A whole scenario, or sections of a run that are laid over the quickstart's."""
    data = tomllib.loads(block.text)
    if "scenario" in data:
        validate(Scenario, data, block.file)
    else:
        validate(RunConfig, merged(load_toml(quickstart_config()), data), block.file)


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a line, without assignments and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token in _ENDS:
            yield words
            words = []
        elif set(token) <= set("<>"):
            next(tokens, None)
        elif words or not _ASSIGNMENT.fullmatch(token):
            words.append(token)
    yield words


def _check_mention(shown: Shown, root: Path) -> list[str]:
    if shown.text.startswith("--"):
        return check([Shown(f"dora-rl {shown.text}", shown.file, shown.line, False)], root)
    if _EXTRAS.fullmatch(shown.text):
        return check([Shown(f"pip install {shown.text}", shown.file, shown.line, False)], root)
    try:
        words = next(simple_commands(shown.text))
    except ValueError:  # not shell at all
        return []
    if (len(words) > 1 and Path(words[0]).name in _PROGRAMS) or words == ["dora-rl"]:
        return check([shown], root)
    return []


def _check_words(words: list[str], whole: bool, directory: Path, root: Path) -> Path:
    """Raises `Wrong`; returns where the shell is afterwards."""
    if not words:
        raise Wrong("no command")
    program = Path(words[0]).name
    if program == "cd":
        if not (directory / words[1]).is_dir():
            raise Wrong(f"no such directory: {words[1]}")
        return directory / words[1]
    if program not in _PROGRAMS:
        raise Wrong(f"{program} is not one of {', '.join(_PROGRAMS)}")
    if words[0] != program and words[0] != f".venv/bin/{program}":
        raise Wrong(f"neither on the PATH nor in .venv/bin: {words[0]}")
    if program == "make":
        _check_make(words[1:], root)
    elif program == "pip":
        _check_pip(words[1:], root)
    elif program == "python":
        _check_python(words[1:], directory)
    elif program == "dora-rl":
        _check_dora(words[1:], whole, directory)
    return directory


_PROGRAMS = ("dora-rl", "make", "pip", "python", "cd")


def _check_make(words: list[str], root: Path) -> None:
    text = (root / "Makefile").read_text()
    targets = set(_recipes(text))
    variables = set(re.findall(r"^([A-Z_]+) \?=", text, flags=re.M))
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            raise Wrong(f"the Makefile has no {'variable' if equals else 'target'} {name}")


def _check_pip(words: list[str], root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for word in words:
        found = _EXTRAS.fullmatch(word)
        for name in found[1].split(",") if found else ():
            if name not in project["optional-dependencies"]:
                raise Wrong(f"the project has no extra {name}")


def _check_python(words: list[str], directory: Path) -> None:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise Wrong(f"no such module: {words[1]}")
    elif not words[0].startswith("-") and not (directory / words[0]).is_file():
        raise Wrong(f"no such file: {words[0]}")


def _check_dora(words: list[str], whole: bool, directory: Path) -> None:
    """A mention may leave out arguments, and name an option without its command."""
    command, ctx = _find(words)
    if isinstance(command, click.Group) and words and not whole:
        _check_option_of_any(words)
        return
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            parsed = command.make_context(command.name, list(words), parent=ctx)
    except Exit:  # --help, --version
        return
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError) as error:
        if whole:
            raise Wrong(f"incomplete: {error.format_message()}") from error
        return
    except click.UsageError as error:
        raise Wrong(error.format_message()) from error
    _check_settings(parsed, directory)


def _find(words: list[str]) -> tuple[click.Command, click.Context | None]:
    """The command that the words name; they are taken from the list."""
    command: click.Command = cli.cli
    ctx: click.Context | None = None
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        ctx = click.Context(command, info_name=command.name, parent=ctx)
        found = command.get_command(ctx, words[0])
        if found is None:
            raise Wrong(f"no such command: {words[0]}")
        command = found
        del words[0]
    return command, ctx


def _check_option_of_any(words: list[str]) -> None:
    """An option by itself must be one of some command's; a key that it sets, of a run's."""
    name, *values = words
    if name not in _options(cli.cli):
        raise Wrong(f"no command has the option {name}")
    if name == "--set":
        for override in values:
            key = tuple(override.partition("=")[0].split("."))
            if find_key(RunConfig, {}, key) is None and find_key(Scenario, {}, key) is None:
                raise Wrong(f"no such key: {override}")


def _options(command: click.Command) -> set[str]:
    found = {name for param in command.params for name in param.opts}
    found |= {"--help"}
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None, name
            found |= _options(below)
    return found


def _check_settings(parsed: click.Context, directory: Path) -> None:
    """The files and the values of `--set`, as the command would read them."""
    given = parsed.params
    overrides = [value for value in given.get("overrides", ()) if not value.endswith(_OPEN)]
    for value in set(given.get("overrides", ())).difference(overrides):
        _check_option_of_any(["--set", value])
    name = str(given.get("config") or given.get("scenario") or "")
    if name.startswith("examples/") and not (directory / name).is_file():
        raise Wrong(f"no such file: {name}")
    try:
        if "config" in given:
            file = directory / name if (directory / name).is_file() else quickstart_config()
            read_config(file, overrides)
        elif "scenario" in given:
            is_file = Path(name).suffix or "/" in name
            names = given["paradigms"].split(",") if given.get("paradigms") else None
            scenario = "default" if is_file or not name else name
            load_scenario(scenario, overrides, paradigms=names)
    except UserError as error:
        raise Wrong(str(error)) from error
