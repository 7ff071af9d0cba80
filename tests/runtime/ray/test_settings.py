"""What a run on Ray is refused for: in one line, before anything is written."""

import socket
import sys
import threading
from contextlib import suppress
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


def test_ray_that_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.extras._present", lambda module: module != "ray")
    said = refused(tmp_path, capsys)
    assert "ray is not installed: `runtime.kind=ray` needs it. Run: pip install" in said


def test_ray_of_another_version_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "version", lambda name: "2.9.3")
    assert "Ray must be >=2.60,<3.0 for runtime.kind=ray: `2.9.3`" in refused(tmp_path, capsys)


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
@pytest.mark.parametrize(("answer", "words"), [(b"", "timed out"), (b"HTTP/1.1 400", "no Ray")])
def test_an_address_of_something_else_is_refused(
    answer: bytes,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setattr("dora_rl.runtime.launchers.ray.cluster._ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(answer)
                while connection.recv(1 << 12):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        said = refused(tmp_path, capsys, f"runtime.ray.address=127.0.0.1:{port_of(server)}")
        thread.join()
    assert words in said and "Start it with `ray start --head`." in said


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.mark.ray
def test_a_cluster_of_another_version_is_refused(
    ray_address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.__version__", "2.61.0")
    said = refused(tmp_path, capsys, f"runtime.ray.address={ray_address}")
    assert "Version mismatch" in said
    assert "Install the cluster's versions of Ray and Python here." in said


@pytest.mark.ray
def test_a_node_without_the_environment_is_refused(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"runtime.ray.address={ray_address}"
    bare = tmp_path / "python"  # without site-packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    said = refused(tmp_path, capsys, address, f"runtime.ray.py_executable={bare}")
    assert f"cannot have workers: `{bare}` has no dora_rl. Run: {bare} -m pip install" in said
    said = refused(tmp_path, capsys, address, "runtime.ray.py_executable=/no/python")
    assert "there is no `/no/python`. Set runtime.ray.py_executable to a Python there." in said


@pytest.mark.ray
def test_a_node_without_the_files_is_refused(ray_address: str) -> None:
    kept = config(address=ray_address)
    with pytest.raises(
        UserError, match=r"node \w+ \(.*\) cannot have workers: there is no `/no/dir`"
    ):
        check(kept, "/no/dir")
    check(kept, "/")


def check(settings: RunConfig, path: str) -> None:
    from dora_rl.runtime.launchers.ray.cluster import check_cluster

    check_cluster(settings, [path])


@pytest.mark.ray
def test_a_port_that_is_taken_is_refused(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the trainer's ranks, which only the node of rank 0 can find out."""
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{port_of(server)}"
        chosen = [f"runtime.ray.address={ray_address}", "train.processes=2"]
        chosen += [f"train.rendezvous={taken}", "runtime.kind=ray", "task.dry_run=false"]
        sets = [word for setting in chosen for word in ("--set", setting)]
        assert main(["train", "--out", str(out), *sets]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen for training processes: `{taken}`" in said
    assert "Set train.rendezvous to an address of this machine and a free port." in said


@pytest.mark.ray
def test_resources_that_no_node_has_are_refused(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"runtime.ray.address={ray_address}"
    said = refused(tmp_path, capsys, address, "runtime.ray.trainer.cpus=99")
    assert "runtime.ray.trainer asks for more than any node of the cluster has: `CPU 99`" in said
    assert "the most on one of 1 is CPU 8" in said
    said = refused(tmp_path, capsys, address, "runtime.ray.trainer.cpus=3", "train.processes=3")
    assert "train.processes are more than the cluster has room for: `3`, each with CPU 3" in said
    assert "there is room for 2 on 1 nodes" in said
