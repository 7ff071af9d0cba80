"""Who may take part, how each is started, and what runs in the environment of vLLM."""

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl import extras
from dora_rl.benchmarks.contestants import roster
from dora_rl.benchmarks.models import Model, open_model
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.registry import EngineName
from dora_rl.engines.vllm import environment as vllm_environment
from dora_rl.machine import run_module

SHAPE = roster.Shape(batch=32, prompt_tokens=64, new_tokens=48, threads=2)
VLLM_FILE = Path(roster.__file__).with_name("vllm.py")
LIMITS = ("DORA_RL_AMX", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model("tiny", None, tmp_path_factory.mktemp("models"))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment as `make venv-vllm` would make it, found by its variable."""
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv(vllm_environment.PYTHON, str(python))
    return python


def vllm_contestant() -> Any:
    """The file, imported as `serving` does it."""
    spec = importlib.util.spec_from_file_location("contestant", VLLM_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sglang"], r"no such contestant: `sglang`\. Use one of: hf, vllm"),
        (["ours"], "no such contestant: `ours`"),
        (["hf", "hf"], "a contestant is given twice: `hf,hf`"),
    ],
)
def test_unknown_contestants_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        roster.check_others(names)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    with pytest.raises(extras.MissingExtra, match=r"--against hf.*dora-rl\[smollm2\]"):
        roster.check_others(["hf"])


def test_vllm_is_found_beside_the_environment(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vllm_environment.find_python() == environment
    monkeypatch.delenv(vllm_environment.PYTHON)
    monkeypatch.setattr(vllm_environment, "_REPOSITORY", tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert vllm_environment.find_python() == environment
    environment.unlink()
    with pytest.raises(UserError, match="Run: make venv-vllm"):
        roster.check_others(["vllm"])


def test_a_named_python_must_be_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        monkeypatch.setenv(vllm_environment.PYTHON, str(path))
        with pytest.raises(UserError, match=rf"is not a program: `{path}`.*make venv-vllm"):
            roster.check_others(["vllm"])


def test_vllm_gets_what_it_needs(tiny: Model, environment: Path) -> None:
    start = roster.other("vllm", tiny, SHAPE)
    # Isolated: neither our packages nor our folder, where a file has its name, are in its path.
    assert start.python == [str(environment), "-I"]
    assert start.settings == {
        "directory": str(tiny.directory),
        "dtype": "bfloat16",
        "slots": 32,
        "context": 112,
    }
    assert start.env["OMP_NUM_THREADS"] == "2"
    assert start.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert start.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "LD_PRELOAD" not in start.env


def test_an_engine_with_its_own_environment_gets_this_package_and_no_other(
    tiny: Model, environment: Path, tmp_path: Path
) -> None:
    vllm, embedded = (
        roster.engine("e", kind, tiny, SHAPE, tmp_path / "w", versions=2, lora_rank=4)
        for kind in (EngineName.VLLM, EngineName.EMBEDDED)
    )
    assert vllm.python == [str(environment), "-I"] and "PYTHONPATH" not in vllm.env
    assert vllm.serving == (run_module.__file__, "dora_rl.benchmarks.contestants.serving")
    assert embedded.python == [sys.executable, "-P"]
    assert vllm.file == embedded.file
    assert {**vllm.settings, "engine": ""} == {**embedded.settings, "engine": ""}


def test_a_side_of_a_move_has_its_socket_in_every_environment(
    tiny: Model, environment: Path, tmp_path: Path
) -> None:
    start = roster.mover("s", EngineName.VLLM, tiny, tmp_path, threads=2, tokens=100, fd=9)
    assert start.python == [str(environment), "-I"]
    assert start.serving == (run_module.__file__, "dora_rl.benchmarks.contestants.serving")
    assert (start.pass_fds, start.settings["fd"]) == ((9,), 9)
    assert start.settings["engine"] == "vllm"


def test_intel_openmp_is_preloaded_where_vllm_has_it(
    tiny: Model, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = environment.parent.parent / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    env = roster.other("vllm", tiny, SHAPE).env
    assert env["LD_PRELOAD"] == f"{library}:/lib/other.so"
    assert int(env["KMP_BLOCKTIME"]) <= 5  # else it spins into the next one's turn


def test_the_kv_memory_of_vllm_holds_every_sequence(tiny: Model, environment: Path) -> None:
    shape = roster.Shape(batch=4096, prompt_tokens=4000, new_tokens=4000, threads=1)
    gb = int(roster.other("vllm", tiny, shape).env["VLLM_CPU_KVCACHE_SPACE"])
    needed = 4096 * 8000 * (2 * 4 * 2 * 32) * 2  # layers, heads, width; 2 bytes
    assert needed < gb << 30 < 3 * needed


def test_every_contestant_is_a_file_and_gets_its_threads(tiny: Model, tmp_path: Path) -> None:
    starts = [
        roster.ours(tiny, SHAPE, tmp_path),
        roster.other("hf", tiny, SHAPE),
        roster.machine(2),
        roster.mover("source", EngineName.EMBEDDED, tiny, tmp_path, threads=2, tokens=100, fd=9),
    ]
    for start in starts:
        assert start.file.is_file()
        assert start.python == [sys.executable, "-P"]
        assert start.env["OMP_NUM_THREADS"] == "2"
        assert start.settings["threads"] == 2
    assert [start.pass_fds for start in starts] == [(), (), (), (9,)]


@pytest.mark.parametrize("name", ["vllm.py", "serving.py"])
def test_what_runs_elsewhere_imports_nothing_of_ours(name: str) -> None:
    tree = ast.parse(VLLM_FILE.with_name(name).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module).partition(".")[0])
    assert found <= {*sys.stdlib_module_names, "torch", "vllm"}


@pytest.mark.parametrize(
    ("env", "broken"),
    [
        ({}, False),
        ({"DORA_RL_AMX": "works"}, False),
        ({"DORA_RL_AMX": "broken"}, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ({"DNNL_MAX_CPU_ISA": "avx2"}, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX_FP16"}, False),
        ({"ONEDNN_MAX_CPU_ISA": "all"}, False),
    ],
)
def test_a_broken_amx_is_known_from_the_environment(
    env: dict[str, str], broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert vllm_contestant().amx_is_broken() is broken


class FakeLlm:
    """What the contestant uses of vLLM; notes what AMX looked like when it was made."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.options = options
        self.amx = torch.cpu._is_amx_tile_supported()

    def generate(self, inputs: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        logprob = types.SimpleNamespace(logprob=-1.5)
        lost = types.SimpleNamespace(logprob=float("nan"))
        count = sampling.max_tokens
        made = types.SimpleNamespace(
            token_ids=list(range(count)),
            logprobs=[{n: lost if n == 2 else logprob} for n in range(count)],
        )
        return [types.SimpleNamespace(outputs=[made]) for _ in inputs]


@pytest.mark.parametrize("marker", ["broken", "works"])
def test_vllm_is_kept_off_a_broken_amx_and_its_work_is_counted(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*LIMITS, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DORA_RL_AMX", marker)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    library = types.ModuleType("vllm")
    vars(library).update(
        __version__="0", LLM=FakeLlm, SamplingParams=lambda **given: types.SimpleNamespace(**given)
    )
    monkeypatch.setitem(sys.modules, "vllm", library)
    vllm = vllm_contestant().load(directory="d", dtype="bfloat16", slots=4, context=20)
    assert vllm._llm.amx is (marker == "works")
    assert vllm._llm.options["enable_prefix_caching"] is False
    assert bool(vllm.about()["notes"]) is (marker == "broken")
    done = vllm.generate([[1, 2], [3, 4]], 3)
    assert (done["tokens"], done["logprobs"]) == (6, 4)
