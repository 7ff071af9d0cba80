"""What `import dora_rl` offers, and what it costs."""

import subprocess
import sys

import pytest

import dora_rl
from dora_rl.runtime.train import Run, train


def test_the_public_names() -> None:
    assert dora_rl.__all__ == ["Run", "__version__", "train"]
    assert dora_rl.train is train
    assert dora_rl.Run is Run
    assert set(dora_rl.__all__) <= set(dir(dora_rl))


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
