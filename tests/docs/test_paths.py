"""Every file, directory, name and link of the documentation is there."""

from pathlib import Path

import pytest

from tests.docs import paths
from tests.docs.pages import ROOT, Page, pages, read_page
from tests.docs.test_shown import listed

PAGES = pages()
ARCHITECTURE = "docs/architecture.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_sources_and_links_exist(page: Page) -> None:
    text = (ROOT / page.file).read_text()
    problems = paths.check_sources(page) + paths.check_links(page, text)
    assert listed(problems + paths.check_names(page, text)) == ""


def test_the_architecture_names_what_is_there() -> None:
    text = (ROOT / ARCHITECTURE).read_text()
    assert listed(paths.check_folders(read_page(ARCHITECTURE, text), text)) == ""
    assert text.count(".py`") > 80  # nothing is passed over


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_the_architecture_is_found(file: str) -> None:
    assert "architecture.md)" in (ROOT / file).read_text()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    found = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in found if f"]({name})" not in index} == set()


@pytest.mark.parametrize(
    "text",
    [
        "see `core/nowhere.py`",
        "`Nobody` in `core/orchestrator.py`",
        "[a page](nowhere.md)",
        "[a part](../docs/nowhere.md#part)",
        "```text\n| runtime/nowhere/ |\n```",
    ],
)
def test_the_checks_can_fail(text: str, tmp_path: Path) -> None:
    page = read_page("docs/a.md", text)
    problems = [
        *paths.check_sources(page),
        *paths.check_names(page, text),
        *paths.check_links(page, text),
        *paths.check_folders(page, text),
    ]
    assert len(problems) == 1


def test_the_checks_let_what_exists_pass() -> None:
    text = (
        "`core/orchestrator.py`, `Orchestrator` in `core/orchestrator.py`, [it](index.md#x), core/"
    )
    page = read_page("docs/a.md", text)
    assert paths.check_sources(page) + paths.check_names(page, text) == []
    assert paths.check_links(page, text) + paths.check_folders(page, text) == []
