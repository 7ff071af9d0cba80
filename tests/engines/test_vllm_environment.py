"""What is refused of vLLM before anything starts; here without vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl import cli
from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines import registry
from dora_rl.engines.registry import EngineName, Interpreter, own_interpreter
from dora_rl.engines.vllm import environment
from dora_rl.engines.vllm.settings import VllmSettings
from dora_rl.machine import run_module
from dora_rl.runtime.control.memory import memory_watch
from dora_rl.runtime.launchers.local import processes


def stand_in(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_python_without_vllm_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no vLLM\. Install 0\.32 there, or run: make venv"):
        environment.check(Path(sys.executable))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 0.11.2", r"has vLLM `0\.11\.2`, and this dora-rl needs 0\.32"),
        ("echo 0.320.1", r"has vLLM `0\.320\.1`"),
        ("echo no such library >&2; exit 3", "cannot be asked for its vLLM: no such library"),
        ("kill -9 $$", "cannot be asked for its vLLM: exit code -9"),
    ],
)
def test_an_environment_that_does_not_serve_is_refused(
    script: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        environment.check(stand_in(tmp_path / "python", script))


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1"])
def test_a_supported_version_is_taken(version: str, tmp_path: Path) -> None:
    environment.check(stand_in(tmp_path / "python", f"echo {version}"))


def test_what_the_engine_sets_is_refused_among_the_arguments() -> None:
    for name, said in (("max_num_seqs", "Set rollout.slots"), ("load_format", "Leave it out")):
        with pytest.raises(UserError, match=f"`{name}`.*{said}"):
            validate(VllmSettings, {"arguments": {name: 1}}, "the configuration")


def test_the_embedded_engine_has_this_python() -> None:
    assert own_interpreter(EngineName.EMBEDDED, {}, "auto") is None


def test_a_gpu_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = stand_in(tmp_path / "python", "")
    monkeypatch.setenv(environment.PYTHON, str(tmp_path / "not this one"))
    found = own_interpreter(EngineName.VLLM, {"python": str(python)}, "cuda:3")
    assert found is not None
    assert found.python == python
    assert found.variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert found.variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found.variables["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_gpus_count_among_those_that_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x")
    assert environment.variables("cuda:1")["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert environment.variables("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment.variables("auto")
    with pytest.raises(UserError, match="`cuda:2`, and CUDA_VISIBLE_DEVICES leaves 2: `4,GPU-x`"):
        environment.variables("cuda:2")


BAD = {
    "two versions in one engine": (["rollout.version_slots=2"], "at most 1"),
    "one process": (["runtime.kind=inline"], "runtime.kind must be `local`"),
    "one process, inexact": (
        ["runtime.kind=inline", "rollout.deterministic=false"],
        "runtime.kind must be `local`",
    ),
    "bit-exact": (["rollout.deterministic=true"], "rollout.deterministic must be false"),
    "too cold": (["rollout.temperature=0.005"], "`0.005`"),
    "two filters": (["rollout.top_p=0.5", "rollout.min_p=0.1"], "cannot go together"),
    "no room for a fingerprint": (["rollout.kv_budget_tokens=32"], "at least 64"),
    "a short context": (["rollout.vllm.context=16"], "rollout.vllm.context"),
    "two engines on one GPU": (["rollout.device=cuda:0", "runtime.instances=2"], "add up to 1"),
    "several tokens at once": (["rollout.vllm.arguments.stream_interval=4"], "stream_interval"),
    "an unknown key": (["rollout.vllm.contxt=5"], "Did you mean `rollout.vllm.context`?"),
    "several GPUs": (["rollout.vllm.tensor_parallel_size=2"], "tensor_parallel_size"),
    "no environment": ([], "make venv-vllm"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_before_anything_is_written(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, message = BAD[name]
    monkeypatch.setenv(environment.PYTHON, str(tmp_path / "absent"))
    args = [arg for one in ["rollout.engine=vllm", *overrides] for arg in ("--set", one)]
    out = tmp_path / "run"
    assert cli.main(["train", "--out", str(out), *args]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not out.exists()


KNOWN = "echo 0.32.0; echo model max_num_batched_tokens swap_space"
NEEDS_VLLM = {
    "an argument that vLLM does not have": (
        ["rollout.vllm.arguments.max_num_batched_tokns=5"],
        "`max_num_batched_tokns`. Did you mean `max_num_batched_tokens`?",
    ),
    "nothing like it": (["rollout.vllm.arguments.colour=5"], "`colour`. Leave it out."),
    "KV below one sequence": (
        ["rollout.kv_budget_tokens=64", "rollout.max_tokens=200"],
        "Raise rollout.kv_budget_tokens",
    ),
    "KV below one block": (
        ["rollout.kv_budget_tokens=64", "rollout.vllm.block_size=128"],
        "at least 128",
    ),
}


@pytest.mark.parametrize("name", NEEDS_VLLM)
def test_what_vllm_is_asked_for_is_told_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_told(tmp_path, capsys, *NEEDS_VLLM[name])


def assert_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    python = stand_in(tmp_path / "python", KNOWN)
    given = ["rollout.engine=vllm", f"rollout.vllm.python={python}", *overrides]
    out = tmp_path / "run"
    sets = [word for one in given for word in ("--set", one)]
    assert cli.main(["train", "--plain", "--out", str(out), *sets]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert not out.exists()


@pytest.mark.skipif(not memory_watch().in_force, reason="memory is watched on Linux alone")
def test_kv_beyond_memory_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = ["rollout.kv_budget_tokens=100000000000", "rollout.device=cpu"]
    assert_told(tmp_path, capsys, beyond, "rollout.kv_budget_tokens")


@pytest.mark.parametrize(
    ("device", "gpu", "here"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda:0", True, False)],
)
def test_kv_on_a_gpu_is_not_of_the_memory_of_this_machine(
    device: str, gpu: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "may_have_gpu", lambda: gpu)
    assert registry.reserves_kv(EngineName.VLLM, device) is here
    assert not registry.reserves_kv(EngineName.EMBEDDED, device)


def test_a_vllm_whose_source_cannot_be_read_refuses_no_argument(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python", "echo 0.32.0")
    assert environment.check(python, {"arguments": {"colour": 1}}) == "0.32.0"


def test_another_python_gets_this_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker is started, with a PYTHONPATH that leads to our libraries."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    *start, file = processes._command(Interpreter(bare / "bin" / "python", {}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    called = subprocess.run(
        [*start, "-c", _CALL, file], capture_output=True, text=True, check=False
    )
    assert called.returncode == 0, called.stderr
    package, library = called.stdout.split(maxsplit=1)
    assert Path(package).is_relative_to(Path(run_module.__file__).parents[1])
    assert library.strip() == "None"


# `run_module` runs a module of the package; here what it prepares is looked at instead.
_CALL = """
import runpy, sys
path = sys.argv[1]
sys.argv = [path, "dora_rl.nothing"]

def look(*given, **more):
    import importlib.util
    import dora_rl.core.protocol.types as types
    print(types.__file__, importlib.util.find_spec("msgspec"))

runpy.run_module = look
exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__", "__file__": path})
"""
