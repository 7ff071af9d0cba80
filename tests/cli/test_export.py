"""`dora-rl export`: what it reports, what it refuses in one line, and how it stops."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dora_rl import cli
from dora_rl.store.rundir import LEDGER
from dora_rl.trainer.settings import LoraSettings
from tests.models.random_models import make_model
from tests.trainer.samples import batch_of, opened

torch.set_num_threads(1)
# The command in a process of its own, which waits for its end in the middle of the weights.
STUCK = """
import sys, time
from dora_rl import cli
from dora_rl.trainer import export

def wait(name, tensor):
    print("begun", flush=True)
    time.sleep(600)

export.ready = wait
sys.exit(cli.main(["export", sys.argv[1], "--merge", "--out", sys.argv[2]]))
"""


def make_run(root: Path, steps: tuple[int, ...], lora: LoraSettings | None) -> Path:
    model = make_model(root / "model", "llama", seed=1, num_hidden_layers=1)
    (root / "run").mkdir()
    (root / "run" / LEDGER).touch()
    with opened(model, root / "store", lora=lora) as trainer:
        for step in range(max(steps)):
            trainer.train(step, batch_of(step))
            if step + 1 in steps:
                trainer.save(root / "run" / "checkpoints" / f"step-{step + 1}")
    return root / "run"


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("lora"), (1, 3), LoraSettings(rank=2))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full"), (1,), None)


def test_json_tells_what_was_written(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(lora), "--merge", "--out", str(out), "--json"]) == 0
    shown, err = capsys.readouterr()
    files = sorted(os.listdir(out))
    assert {"config.json", "model.safetensors"} <= set(files)
    assert json.loads(shown) == {"out": str(out), "step": 3, "merged": True, "files": files}
    assert err == ""


def test_a_step_is_exported_by_its_number(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(lora), "--step", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: step 1, LoRA adapter, {len(os.listdir(out))} files\n"
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (lora / "checkpoints" / "step-1" / name).read_bytes()


def test_merging_full_weights_exports_them_and_says_so(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(full), "--merge", "--out", str(out), "--json"]) == 0
    shown, err = capsys.readouterr()
    assert json.loads(shown)["merged"] is False
    assert err == f"note: `{full}` trained full weights: there is no adapter to merge\n"
    name = "model.safetensors"
    assert (out / name).read_bytes() == (full / "checkpoints" / "step-1" / name).read_bytes()


@pytest.mark.parametrize(
    ("run", "args", "message"),
    [
        (
            "{run}",
            ["--step", "2"],
            "no checkpoint of step `2` in `{run}`. There are those of: 1, 3.",
        ),
        ("{tmp}/none", [], "no such run: `{tmp}/none`. Give a directory"),
        ("{tmp}/empty", [], "not a run: `{tmp}/empty` has neither ledger.sqlite nor checkpoints/."),
        ("{run}/checkpoints/step-3", [], "not a run: `{run}/checkpoints/step-3` has neither "),
        ("{tmp}/begun", [], "no checkpoint in `{tmp}/begun` yet. Run: dora-rl train --resume "),
        ("{run}", ["--out", "{tmp}/begun"], "not empty: `{tmp}/begun` holds a run."),
        ("{run}", ["--out", "{tmp}/taken"], "not empty: `{tmp}/taken`. Name a new directory"),
        ("{run}", ["--out", "{tmp}/taken/a"], "not a directory: `{tmp}/taken/a`. Name a new"),
        ("{run}", ["--out", "{run}"], "within the run: `{run}`. Name a directory outside"),
        ("{run}", ["--out", "{run}/x"], "within the run: `{run}/x`. Name a directory outside"),
        ("{run}", ["--step", "x"], "Invalid value for '--step': 'x' is not a valid integer"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    lora: Path,
    tmp_path: Path,
    run: str,
    args: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("empty", "begun", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / LEDGER).touch()
    (tmp_path / "taken" / "a").touch()
    before = sorted(tmp_path.rglob("*")), sorted(lora.rglob("*"))
    words = ["export", run, "--out", "{tmp}/out", *args]
    assert cli.main([word.format(run=lora, tmp=tmp_path) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message.format(run=lora, tmp=tmp_path)}")
    assert err.count("\n") == 1
    assert (sorted(tmp_path.rglob("*")), sorted(lora.rglob("*"))) == before


def test_out_must_be_given(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(lora)]) == 2
    assert capsys.readouterr().err.startswith("error: Missing option '--out'")


def test_a_base_that_is_gone_is_one_line(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = lora.parent / "model"
    base.rename(lora.parent / "away")
    try:
        args = ["export", str(lora), "--merge", "--out", str(tmp_path / "out")]
        assert cli.main(args) == 2
    finally:
        (lora.parent / "away").rename(base)
    err = capsys.readouterr().err
    assert err.startswith(f"error: the base of the adapter is no model directory: `{base}`")
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_without_its_extra_it_says_how_to_get_it(lora: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import dora_rl.cli as c;"
        "sys.exit(c.main(['export', sys.argv[1], '--out', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(lora), str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: torch is not installed: `dora-rl export` needs it. "
        "Run: pip install 'dora-rl[engine]'\n"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_stopped_export_leaves_nothing(lora: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, str(lora), str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "begun\n"
        assert len(os.listdir(tmp_path)) == 1
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read().strip() == "error: interrupted"
    assert process.returncode == 130
    assert os.listdir(tmp_path) == []


def test_a_copied_run_is_exported(lora: Path, tmp_path: Path) -> None:
    """Also without its ledger: checkpoints are all that it needs."""
    shutil.copytree(lora / "checkpoints", tmp_path / "copy" / "checkpoints")
    assert cli.main(["export", str(tmp_path / "copy"), "--out", str(tmp_path / "out")]) == 0
