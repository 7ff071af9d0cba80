"""What `import dora_rl` offers, and what it costs."""

import subprocess
import sys
from inspect import signature

import pytest

import dora_rl
from dora_rl.runtime.api import resume, train
from dora_rl.runtime.execution import Run


def test_the_public_names() -> None:
    assert dora_rl.__all__ == ["Run", "__version__", "resume", "train"]
    assert dora_rl.train is train
    assert dora_rl.resume is resume
    assert dora_rl.Run is Run
    assert set(dora_rl.__all__) <= set(dir(dora_rl))


def test_the_public_names_of_the_sandbox() -> None:
    from dora_rl import sandbox

    assert sandbox.__all__ == ["Execution", "SandboxError", "run_python"]
    parameters = signature(sandbox.run_python).parameters
    assert list(parameters) == ["code", "stdin", "timeout_s", "memory_mb", "max_output"]
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "code")


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="`trian`"):
        dora_rl.trian  # noqa: B018


def test_importing_it_imports_nothing_of_weight() -> None:
    code = """
import sys, dora_rl
heavy = {"torch", "numpy", "pydantic", "rich", "click", "transformers"}
print(sorted(heavy & sys.modules.keys()), sorted(m for m in sys.modules if m.startswith("dora_rl")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] ['dora_rl']\n"
