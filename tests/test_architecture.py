"""What may import what, where the import contracts of pyproject.toml cannot say it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dora_rl

PACKAGE = Path(dora_rl.__file__).parent

# The core decides; each of these would let it act, wait, guess, or depend on the machine.
NOT_IN_CORE = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "signal", "threading"),
    *("calendar", "datetime", "time", "zoneinfo"),
    *("random", "secrets", "uuid", "tempfile"),
    *("http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"),
    *("fileinput", "glob", "io", "logging", "mmap", "os", "pathlib", "shutil", "sqlite3"),
    *("ctypes", "gc", "importlib", "platform", "subprocess", "sys", "weakref"),
    *("pickle", "marshal", "shelve"),
}
NOT_CALLED_IN_CORE = {"open", "print", "input", "eval", "exec", "compile", "__import__", "id"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Each library of weight is imported in one place, so that the rest runs without it.
ONLY_IN = {
    "ray": ["runtime/launchers/ray/"],
    "vllm": ["engines/vllm/", "benchmarks/contestants/vllm.py"],
    "torch": [
        *("algorithms/", "models/", "trainer/", "engines/", "weights/", "benchmarks/"),
        *("runtime/workers/", "runtime/launchers/", "transports/weights/", "doctor/torch_build.py"),
    ],
    "numpy": [
        *("algorithms/", "models/", "trainer/", "engines/", "weights/"),
        "runtime/launchers/ray/objects.py",  # Ray copies an array once, and bytes twice
    ],
    "safetensors": ["models/", "trainer/", "weights/", "benchmarks/models.py"],
    "tokenizers": ["models/"],
    "transformers": ["models/packaged.py", "trainer/", "benchmarks/contestants/"],
    "datasets": ["tasks/", "benchmarks/contestants/"],
    "reasoning_gym": ["tasks/"],
    "math_verify": ["tasks/"],
    "matplotlib": ["benchmarks/convergence.py"],
    "gguf": ["models/packaged.py"],
    "accelerate": ["models/packaged.py"],
}


def sources(folder: str = "") -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, by its full dotted name; `.` stands for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module or ""


def breaches_of_core(tree: ast.AST) -> list[str]:
    allowed = set(sys.stdlib_module_names) - NOT_IN_CORE
    found = [
        f"imports {name}"
        for name in imports(tree)
        if name.partition(".")[0] not in allowed
        and name != "dora_rl.core"
        and not name.startswith("dora_rl.core.")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in NOT_CALLED_IN_CORE:
                found.append(f"calls {node.func.id}()")
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append("is asynchronous")
    return found


def test_core_decides_and_does_nothing_else() -> None:
    files = sources("core")
    assert files
    found = {path.name: breaches_of_core(ast.parse(path.read_text())) for path in files}
    assert {name: breaches for name, breaches in found.items() if breaches} == {}


@pytest.mark.parametrize(
    "breach",
    [
        "import time",
        "from random import Random",
        "import os.path",
        "import pydantic",
        "import dora_rl",
        "from dora_rl import core",
        "from dora_rl.config import validate",
        "import dora_rl.core_tools",
        "from . import types",
        "def f():\n    import socket",
        "print(1)",
        "async def f(): pass",
    ],
)
def test_the_check_of_core_can_fail(breach: str) -> None:
    assert len(breaches_of_core(ast.parse(breach))) == 1


def test_the_check_of_core_lets_pure_modules_pass() -> None:
    code = "import json, heapq\nfrom dora_rl.core.protocol.types import X"
    assert breaches_of_core(ast.parse(code)) == []


def test_no_file_of_ours_is_a_pickle() -> None:
    found = {
        str(path.relative_to(PACKAGE)): name
        for path in sources()
        for name in imports(ast.parse(path.read_text()))
        if name.partition(".")[0] in PICKLES
    }
    assert found == {}


def test_heavy_libraries_stay_where_they_belong() -> None:
    found = [
        f"{place} imports {name}"
        for path in sources()
        for place in [path.relative_to(PACKAGE).as_posix()]
        for name in imports(ast.parse(path.read_text()))
        for library in [name.partition(".")[0]]
        if library in ONLY_IN and not any(place.startswith(p) for p in ONLY_IN[library])
    ]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(PACKAGE))
        for path in sources()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def clocks(tree: ast.AST) -> list[str]:
    """What can jump: the time of day, and imports that would hide where it is read."""
    found = [
        f"time.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns")}
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = [alias.name for alias in node.names if alias.name != "timedelta"]
            found += [f"from {node.module} import {name}" for name in names]
        elif isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name == "datetime"]
    return found


@pytest.mark.parametrize("folder", ["runtime", "tasks", "store", "weights", "engines", "trainer"])
def test_a_run_does_not_read_the_time_of_day(folder: str) -> None:
    found = {path.name: clocks(ast.parse(path.read_text())) for path in sources(folder)}
    assert {name: reads for name, reads in found.items() if reads} == {}


@pytest.mark.parametrize(
    "breach", ["time.time()", "from time import time", "import datetime", "time.time_ns()"]
)
def test_the_check_of_clocks_can_fail(breach: str) -> None:
    assert len(clocks(ast.parse(breach))) == 1
