"""What a run on Ray is refused for: in one line, before anything is written."""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig, Threads
from dora_rl.runtime.launchers.ray import installation
from dora_rl.runtime.launchers.ray.settings import Resources


def config(**ray: Any) -> RunConfig:
    runtime = {"kind": "ray", "instances": 3, "ray": ray}
    return validate(RunConfig, {"model": {"path": "quickstart"}, "runtime": runtime}, "test")


def test_threads_are_the_cpus_that_a_worker_asks_for() -> None:
    assert config().threads() == Threads(1, 1)
    assert config(rollout={"cpus": 4}, trainer={"cpus": 6.5}).threads() == Threads(4, 6)
    assert config(rollout={"cpus": 0}, trainer={"cpus": 0.5}).threads() == Threads(1, 1)


def test_a_bundle_has_what_is_asked_for_alone() -> None:
    assert Resources(cpus=0).bundle == {}
    assert Resources(gpus=2, custom={"fast": 0.5}).bundle == {"CPU": 1, "GPU": 2, "fast": 0.5}


@pytest.mark.parametrize(
    ("ray", "words"),
    [
        ({"address": "ray://head:10001"}, "`ray://head:10001`. Use `host:port`"),
        ({"rollout": {"custom": {"gpu": 1}}}, "no resource of Ray's own: `gpu`"),
        ({"trainer": {"custom": {"fast": 0}}}, "custom.fast must be > 0: `0.0`"),
        ({"adress": "head:6379"}, "Did you mean `runtime.ray.address`"),
        ({"trainer": {"cpus": -1}}, "runtime.ray.trainer.cpus"),
    ],
)
def test_bad_settings_are_refused(ray: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        config(**ray)
    assert words in str(refused.value)


@pytest.mark.parametrize("found", ["2.59.9", "3.0.0", "1.13"])
def test_another_version_of_ray_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "version", lambda name: found)
    with pytest.raises(UserError, match=rf">=2\.60,<3\.0 .*`{found}`\. Run: pip install"):
        installation.check_installed()


def test_the_version_that_is_installed_is_not_refused() -> None:
    installation.check_installed()


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    out = tmp_path / "run"
    chosen = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", "--set", "runtime.kind=ray", "--out", str(out), *chosen]) == 2
    said = capsys.readouterr()
    assert not out.exists() and not said.out
    assert said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.ray
def test_an_address_that_does_not_answer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tmp_path, capsys, "runtime.ray.address=127.0.0.1:1")
    assert "`127.0.0.1:1`: Connection refused. Start it with `ray start --head`." in said


@pytest.mark.ray
def test_resources_that_no_node_has_are_refused(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"runtime.ray.address={ray_address}"
    said = refused(tmp_path, capsys, address, "runtime.ray.trainer.cpus=99")
    assert "runtime.ray.trainer asks for more than any node of the cluster has: `CPU 99`" in said
    assert "the most on one of 1 is CPU 8" in said
