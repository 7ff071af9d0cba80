"""What the repository tells its tools: workflow, hooks and templates parse, and say what is so."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = [
    ROOT / ".pre-commit-config.yaml",
    *sorted((ROOT / ".github").rglob("*.yml")),
]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["timeout-minutes"] == 90
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert [words for words in commands if words[-1] == ".ci/run"] == [
        ["taskset", "--cpu-list", "0,1", ".ci/run"]
    ]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (python,) = [step for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["with"]["python-version"] == "3.11"
    (upload,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "failure()"
    assert "runs/**/logs/" in upload["with"]["path"].split()


def test_a_workflow_may_only_read() -> None:
    assert read(".github/workflows/ci.yml")["permissions"] == {"contents": "read"}


def test_hooks_are_pinned_to_what_ci_has() -> None:
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"  # nothing but packages is fetched
    constraints = set((ROOT / "constraints.txt").read_text().split())
    needed = {name for hook in repo["hooks"] for name in hook.get("additional_dependencies", ())}
    assert all("==" in name for name in needed)
    ours = {name for name in needed if not name.startswith("pre-commit-hooks==")}
    assert ours and ours <= constraints
    entries = {hook["entry"].split()[0] for hook in repo["hooks"]}
    assert {"ruff", ".venv/bin/lint-imports", "trailing-whitespace-fixer"} <= entries


def test_hooks_check_what_lint_checks() -> None:
    """But for types, which take long."""
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    checked = re.findall(r"\$\(BIN\)/(\S+(?: check| format)?)", recipe)
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    entries = " ".join(hook["entry"] for hook in repo["hooks"])
    assert [tool for tool in checked if tool not in entries] == ["mypy"]


def test_a_bug_comes_with_what_the_machine_has() -> None:
    body = {item.get("id"): item for item in read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "`dora-rl doctor`" in body["doctor"]["attributes"]["label"]
    assert body["doctor"]["validations"]["required"]
