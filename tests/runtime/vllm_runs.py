"""Runs with the real vLLM: their model, their configuration, and vLLM with a fault in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.events import Event
from dora_rl.engines.vllm import environment
from tests.engines.vllm.shape import SHAPE
from tests.models.random_models import make_model, make_tokenizer
from tests.runtime.harness import children, records

VOCABULARY = 300
VLLM: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "local", "instances": 2, "report_period_s": 0.1},
    "rollout": {"engine": "vllm", "slots": 4, "max_tokens": 40, "stop": ["a"]},
}
ALONE = {**VLLM, "runtime": {**VLLM["runtime"], "instances": 1}}
# Before the worker: vLLM is the real one, but for what the fault replaces in its engine.
_WORKER = """
import os, runpy, signal, sys, time
from pathlib import Path
from vllm.v1.engine.llm_engine import LLMEngine

struck = Path({struck!r})
plain_step, plain_add = LLMEngine.step, LLMEngine.add_request
{fault}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_PYTHON = """#!/bin/sh
[ "$2" = -u ] || exec "{python}" "$@"
shift 2
exec "{python}" -I -u "{worker}" "$@"
"""


def make_vllm_model(directory: Path, **shape: Any) -> Path:
    """A llama whose heads vLLM takes, with a tokenizer; token 0 ends a text."""
    ends = {"vocab_size": VOCABULARY, "eos_token_id": 0, "bos_token_id": 0}
    make_model(directory, "llama", seed=1, **{**SHAPE, **ends, **shape})
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in children()}
    yield
    assert {child.pid for child in children()} <= before


def faulty_python(directory: Path, fault: str) -> Path:
    """A Python for `rollout.vllm.python`, whose workers run this code before they start.

    It may replace methods of `LLMEngine`, and has an empty directory `struck` to take notes in.
    """
    python, worker, struck = (directory / name for name in ("python", "worker.py", "struck"))
    struck.mkdir()
    worker.write_text(_WORKER.format(struck=str(struck), fault=fault))
    python.write_text(_PYTHON.format(python=environment.find_python(), worker=worker))
    python.chmod(0o755)
    return python


def session_of(pid: int) -> int | None:
    """A worker leads a session: whatever it starts is in that."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def events(directory: Path, kind: type[Event]) -> list[Any]:
    return [r.event for r in records(directory) if isinstance(r.event, kind)]
