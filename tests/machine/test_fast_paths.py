"""Fast paths: each is listed, tried once, and gone where the switch says so."""

import ast
import importlib
import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

import dora_rl
from dora_rl.machine import fast_paths, processor, trials
from dora_rl.machine.fast_paths import (
    FAST_PATHS,
    PORTABLE,
    Trial,
    Unavailable,
    attempt,
    fast_path,
    portable,
    tried,
)

PACKAGE = Path(dora_rl.__file__).parent


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)
    monkeypatch.setattr(fast_paths, "_tried", {})


def decorated() -> dict[str, str]:
    """Every `@fast_path("name")` of the package, with the function below it."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "fast_path":
                    (name,) = decorator.args
                    assert isinstance(name, ast.Constant)
                    found[name.value] = f"{module}:{node.name}"
    return found


def test_one_place_lists_them_all() -> None:
    assert decorated() == {name: path.tried_by for name, path in FAST_PATHS.items()}
    for path in FAST_PATHS.values():
        assert path.gives and path.otherwise


def test_the_page_of_the_docs_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/machines.md").read_text()
    for name, path in FAST_PATHS.items():
        assert f"| `{name}` | {path.gives} | {path.otherwise} |" in page


@pytest.mark.parametrize("name", FAST_PATHS)
def test_the_switch_turns_each_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    found = attempt(name)
    assert not found.in_force and found.value == 0 and PORTABLE in found.finding
    assert tried() == {name: found}


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_what_turns_the_switch(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, value)
    assert portable() == on


def test_a_trial_is_made_once_for_the_same_arguments() -> None:
    calls = []

    @fast_path("cpu-affinity")
    def trial(size: int) -> tuple[str, int]:
        calls.append(size)
        return "found", size

    assert [trial(3).value, trial(3).value, trial(4).value] == [3, 3, 4]
    assert calls == [3, 4]


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (Unavailable("slower here"), "slower here"),
        (RuntimeError("needs\n  avx512bw"), "RuntimeError: needs avx512bw"),
        (ValueError("x" * 500), "ValueError: " + "x" * 199 + "…"),
    ],
)
def test_whatever_a_trial_raises_is_its_finding(error: Exception, finding: str) -> None:
    @fast_path("amx")
    def trial() -> tuple[str, int]:
        raise error

    assert trial() == Trial(False, finding)
    assert tried() == {"amx": Trial(False, finding)}


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.cores() >= 1
    monkeypatch.setattr(processor, "affinity", lambda: Trial(False, "macOS does not tell"))
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert processor.cores() == 7
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert processor.cores() == 1


# In a child


def test_a_trial_that_kills_its_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cpu-affinity", "amx", "fork", "call-watch"]
    code = (
        "import json, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    if name == 'amx': os.kill(os.getpid(), 4)\n"
        "    if name == 'call-watch': sys.exit('boom')\n"
        "    print(json.dumps([name, True, 'well', 0]), flush=True)\n"
    )
    original = subprocess.Popen

    def stand_in(arguments: list[str], **options: object) -> object:
        return original([sys.executable, "-c", code, *arguments[4:]], **options)

    monkeypatch.setattr(trials.subprocess, "Popen", stand_in)
    assert trials.in_child(names) == {
        "cpu-affinity": Trial(True, "well"),
        "amx": Trial(False, "it died of SIGILL"),
        "fork": Trial(True, "well"),
        "call-watch": Trial(False, "boom"),
    }


def test_a_child_finds_what_this_process_does() -> None:
    found = trials.in_child(["cpu-affinity", "parent-death"])
    assert found == {name: attempt(name) for name in found}


# Not Linux

# What only Linux has, or what some other system that we mean to run on lacks.
ONLY_LINUX = {
    *("sched_getaffinity", "sched_setaffinity", "waitid", "P_ALL", "fdatasync", "O_PATH"),
    *("memfd_create", "pidfd_open", "eventfd", "epoll", "SOCK_SEQPACKET", "posix_fadvise"),
    *("copy_file_range", "splice", "setns", "unshare", "prlimit", "posix_fallocate"),
    *("getrandom", "O_TMPFILE", "O_DIRECT", "setresuid", "process_vm_readv"),
}
# Where it is asked first whether this is Linux.
ASKED_FIRST = {
    *("sandbox/linux.py", "machine/processor.py", "sandbox/worker_process.py"),
    *("runtime/launchers/local/forkserver.py", "runtime/launchers/local/forkserver_client.py"),
}
BEHIND_PROC = {
    *(
        "sandbox/linux.py",
        "machine/processor.py",
        "sandbox/worker_process.py",
        "sandbox/isolation.py",
    ),
    *("runtime/launchers/local/forkserver.py", "runtime/launchers/local/forkserver_client.py"),
    *("runtime/control/memory.py", "faultlab/processes.py", "benchmarks/contestants/process.py"),
}


def test_what_only_linux_has_is_used_where_it_is_asked_for() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in asked if ast.unparse(node.value) != "linux"}  # our own module
        if name not in ASKED_FIRST:
            assert not used & ONLY_LINUX, f"{name} takes {used & ONLY_LINUX} for granted"
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        docs = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if has_docstring(n)}
        found = [t for t in texts if isinstance(t, str) and "/proc/" in t and t not in docs]
        if name not in BEHIND_PROC | {"machine/fast_paths.py"}:
            assert not found, f"{name} takes {found} for granted"


def has_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


WITHOUT_LINUX = """
import os, select, socket
for module, names in ((os, {names!r}), (select, {names!r}), (socket, {names!r})):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.mark.slow
def test_a_run_where_linux_is_not(tmp_path: Path) -> None:
    """What Linux alone has is taken from every process of a short run, rewards included."""
    site = tmp_path / "site"
    site.mkdir()
    code = WITHOUT_LINUX.format(names=sorted(ONLY_LINUX - {"epoll"}))
    (site / "sitecustomize.py").write_text(code)
    (site / "lengths.py").write_text(
        "import os\n\n\ndef reward(response):\n"
        "    assert not hasattr(os, 'sched_getaffinity')\n    return len(response) / 10\n"
    )
    out = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dora_rl", "train", "--steps", "2", "--json"),
            *("--set", "task.reward=lengths:reward", "--set", "task.eval_size=4"),
            *("--set", "orchestration.groups_per_step=2", "--out", str(out)),
        ],
        env={**os.environ, "PYTHONPATH": str(site), PORTABLE: "1"},
        capture_output=True,
        text=True,
        cwd=site,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["audit"]["ok"]
    assert "the user's privileges" in done.stderr  # what is not kept from the reward


def test_every_trial_is_a_function_of_no_arguments() -> None:
    for path in FAST_PATHS.values():
        module, _, name = path.tried_by.partition(":")
        trial = getattr(importlib.import_module(f"dora_rl.{module}"), name)
        needed = [p for p in signature(trial).parameters.values() if p.default is p.empty]
        assert not needed, f"the doctor cannot call {path.tried_by}"
