"""Whether what a page names is there: sources, directories, names in a source, links."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, Page

_SOURCE = re.compile(r"[\w./-]+\.py")
_FOLDER = re.compile(r"(?<![\w./-])[a-z][a-z_.]*(?:/[a-z_]+)*/(?=[\s,:`)]|$)")
_NAME_IN = re.compile(r"`(\w+)`\s+in\s+`([\w./-]+\.py)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def check_sources(page: Page, root: Path = ROOT) -> list[str]:
    """What is wrong with the Python files that a page's inline code names."""
    return [
        f"{shown.place}: no such file: {shown.text}"
        for shown in page.mentions
        if _SOURCE.fullmatch(shown.text) and find(shown.text, root) is None
    ]


def check_folders(page: Page, text: str, root: Path = ROOT) -> list[str]:
    """The same of directories, in all of a page's text, pictures included."""
    return [
        f"{page.file}: no such directory: {name}"
        for name in sorted({found[0] for found in _FOLDER.finditer(text)})
        if find(name, root) is None
    ]


def check_names(page: Page, text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with each "`NAME` in `file`"."""
    found = [(name, path, find(path, root)) for name, path in _NAME_IN.findall(text)]
    return [
        f"{page.file}: {path} has no {name}"
        for name, path, file in found
        if file is None or not re.search(rf"\b{name}\b", file.read_text())
    ]


def check_links(page: Page, text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the links to other files."""
    return [
        f"{page.file}: a link leads nowhere: {target}"
        for target in _targets(text)
        if not (root / page.file).parent.joinpath(target).exists()
    ]


def _targets(text: str) -> Iterator[str]:
    code = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", flags=re.M | re.S)
    for target in _LINK.findall(code.sub("", text)):
        if "://" not in target:
            yield target


def find(name: str, root: Path = ROOT) -> Path | None:
    """A file or directory of the repository or of the package."""
    places = [root / name, root / "src" / "dora_rl" / name]
    return next((place for place in places if place.exists()), None)
