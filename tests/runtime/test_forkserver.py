"""The server that workers are forks of: started once, replaced when it must be, never trusted."""

import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event, InstanceFailed, TrajectoryFinished
from dora_rl.faultlab.processes import is_forkserver, sandbox_processes, workers_of_driver
from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.launchers.local import forkserver_client
from dora_rl.runtime.launchers.local.forkserver import LARGEST
from dora_rl.runtime.launchers.local.forkserver_client import (
    ForkedProcess,
    ForkServer,
    Recipe,
    worker_fork,
)
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.local.site import Site
from tests.patience import PATIENCE_S
from tests.runtime.harness import assert_sound, records, run
from tests.runtime.test_local import ALONE
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind
from tests.tasks.processes import eventually

pytestmark = pytest.mark.skipif(not worker_fork().in_force, reason=worker_fork().finding)
STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


@pytest.fixture(autouse=True)
def nobody_refused() -> Iterator[None]:
    yield
    ForkServer.refused = None


def servers() -> list[int]:
    ours = psutil.Process().children()
    return [child.pid for child in ours if is_forkserver(child.pid, os.getpid())]


def recipe() -> Recipe:
    return Recipe((sys.executable, "-m"), (), frozenset(os.environ.items()))


@contextmanager
def waiting(directory: Path, **variables: str) -> Iterator[ForkedProcess]:
    """A worker that is told nothing, and ends when it is let go."""
    ours, theirs = socket.socketpair()
    site = Site(str(directory), str(directory), os.getpid())
    with ours, theirs, open(directory / "worker.log", "ab") as log:
        server = ForkServer.of_this_process(recipe(), log)
        assert server is not None
        environment = {**os.environ, **variables}
        process = server.fork("a worker", site, environment, theirs, log.fileno())
        theirs.close()
        yield process
    process.wait(PATIENCE_S)


def misled(directory: Path) -> WorkerProcess:
    """A worker whose configuration is none."""
    setup = ms.Setup(role="rollout", config={}, threads=1)
    site = Site(str(directory), str(directory), os.getpid())
    return WorkerProcess("the worker", setup, site, directory / "worker.log", forked=True)


class KillsServer(Listener):
    """In the middle of the run."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.workers: list[int] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, TrajectoryFinished) and not self.killed:
            self.killed = servers()
            self.workers = list(workers_of_driver(os.getpid()).values())
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_workers_are_forks_of_one_server_which_is_no_process_of_the_sandbox(
    model: Path, tmp_path: Path
) -> None:
    class Look(Listener):
        parents: frozenset[int] = frozenset()
        names: frozenset[str] = frozenset()
        sandbox: tuple[int, ...] = ()

        def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
            if isinstance(event, TrajectoryFinished) and not self.parents:
                workers = workers_of_driver(os.getpid())
                processes = [psutil.Process(pid) for pid in workers.values()]
                self.parents = frozenset(process.ppid() for process in processes)
                self.names = frozenset(process.name() for process in processes)
                self.sandbox = tuple(sandbox_processes(os.getpid()))

    look = Look()
    assert_sound(run(model, tmp_path / "first", look, **ALONE))
    assert list(look.parents) == servers()
    assert look.names == {"trainer", "rollout-0"}
    assert not look.parents & set(look.sandbox)
    again = Look()
    assert_sound(run(model, tmp_path / "second", again, **ALONE))
    assert again.parents == look.parents, "another run has the same server"


@pytest.mark.faults
def test_the_death_of_the_server_is_the_death_of_its_workers_and_they_are_replaced(
    model: Path, tmp_path: Path
) -> None:
    killer = KillsServer()
    ended = run(model, tmp_path / "run", killer, **ALONE)
    assert_sound(ended)
    assert len(killer.killed) == 1 and len(killer.workers) == 2
    assert not {*killer.killed, *killer.workers} & set(psutil.pids())
    (lost,) = [r.event for r in records(ended.directory) if isinstance(r.event, InstanceFailed)]
    assert "SIGKILL" in lost.reason


@pytest.mark.slow
def test_imports_that_start_threads_are_not_forked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = run(model, tmp_path / "run", **ALONE)
    assert_sound(ended)
    assert ForkServer.refused is not None and "threads: 1" in ForkServer.refused
    assert "fresh interpreters" in caplog.text
    assert "lack the threads" in (ended.directory / "logs/trainer.log").read_text()


@pytest.mark.slow
def test_another_environment_needs_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(tmp_path) as first:
        (before,) = {psutil.Process(first.pid).ppid()} & set(servers())
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "maybe")
        with waiting(tmp_path) as second:
            after = psutil.Process(second.pid).ppid()
            assert sorted(servers()) == sorted([before, after]), "each has a worker"
    monkeypatch.undo()
    with waiting(tmp_path) as third:
        assert psutil.Process(third.pid).ppid() == before
        assert servers() == [before], "the idle one was ended"


def test_a_worker_that_is_not_there_yet_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = servers()
    worker = misled(tmp_path)
    # It has no command line for a moment, between its start and the first look at it.
    assert eventually(lambda: set(servers()) != set(before))
    (server,) = set(servers()) - set(before)
    worker.kill()
    assert worker.death() == "the worker ended with signal SIGKILL"
    assert server not in servers()
    worker.end()


def test_a_fork_has_nothing_of_its_server_and_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of the worker that is asked for next, whose files may have come by then.

    They have if the orders are long and wait for the imports of a new server.
    """
    monkeypatch.setenv("NEW", "1")
    long = "x" * 50_000
    with waiting(tmp_path, LONG=long) as one, waiting(tmp_path, LONG=long) as other:
        for pid in (one.pid, other.pid):
            assert os.getsid(pid) == pid
            assert eventually(partial(has_only_its_own, pid, tmp_path / "worker.log"))


def has_only_its_own(pid: int, log: Path) -> bool:
    """Nothing, its log twice, and its channel: a fork closes the rest once it is there."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found[path.name] = str(path.readlink())
    standard = [found.pop(name) for name in ("0", "1", "2")]
    channel = ["socket" in name for name in found.values()]
    return standard == [os.devnull, str(log), str(log)] and channel == [True]


def test_how_a_worker_ended_is_told(tmp_path: Path) -> None:
    with waiting(tmp_path) as left:
        assert left.returncode is None
        with pytest.raises(subprocess.TimeoutExpired):
            left.wait(0.01)
    assert left.returncode == 1, "its driver is gone"
    with waiting(tmp_path) as killed:
        os.kill(killed.pid, signal.SIGTERM)
        assert killed.wait(PATIENCE_S) == -signal.SIGTERM
    worker = misled(tmp_path)
    assert worker.death().startswith("the worker ended with exit code 2")
    worker.end()


def test_a_server_that_stands_still_can_be_given_up(tmp_path: Path) -> None:
    """It would never say that its worker has ended."""
    with waiting(tmp_path) as worker:
        server = psutil.Process(worker.pid).ppid()
        os.kill(server, signal.SIGSTOP)
        worker.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.2)
        worker.give_up()
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL
        assert server not in servers()


def test_a_server_that_takes_no_orders_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver_client, "_SEND_S", 0.2)
    with waiting(tmp_path) as first:
        server = psutil.Process(first.pid).ppid()
        os.kill(server, signal.SIGSTOP)
        with waiting(tmp_path, LONG="x" * (LARGEST - (1 << 16))) as second:
            assert second.wait(PATIENCE_S) == -signal.SIGKILL
        assert first.wait(PATIENCE_S) == -signal.SIGKILL
        assert server not in servers()


def test_what_a_server_had_said_is_heard_after_its_death(tmp_path: Path) -> None:
    with waiting(tmp_path) as worker:
        server = ForkServer.of_this_process(recipe(), io.BytesIO())
        assert server is not None
        os.kill(worker.pid, signal.SIGTERM)
        select.select([server._socket], [], [], PATIENCE_S)
        assert worker.returncode is None, "said, and not heard yet"
        server.close()
        assert worker.returncode == -signal.SIGTERM


def test_what_is_no_text_in_the_environment_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD", "\udcff")
    with waiting(tmp_path) as worker:
        assert b"ODD=\xff\0" in Path(f"/proc/{worker.pid}/environ").read_bytes()


def test_a_fork_that_the_system_refuses_ends_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os
fork, forks = os.fork, []
def refusing():
    forks.append(1)
    if len(forks) == 2:
        raise BlockingIOError("no process is left")
    return fork()
os.fork = refusing
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with waiting(tmp_path) as first:
        assert first.pid
        with waiting(tmp_path) as second:
            assert second.wait(PATIENCE_S) == 1
        assert "not forked: no process is left" in (tmp_path / "worker.log").read_text()
        with waiting(tmp_path) as third:
            assert psutil.Process(third.pid).ppid() == psutil.Process(first.pid).ppid()
        assert first.returncode is None


def test_a_thread_has_a_server_of_its_own_which_ends_with_it(tmp_path: Path) -> None:
    """The kernel ends a process with the thread that has started it."""
    found: list[int] = []

    def go() -> None:
        with waiting(tmp_path) as worker:
            found.append(psutil.Process(worker.pid).ppid())

    with waiting(tmp_path) as worker:
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        assert psutil.Process(worker.pid).ppid() not in found
        assert worker.returncode is None
        with waiting(tmp_path):
            assert not set(found) & set(servers())


def test_the_portable_way_is_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    assert not worker_fork().in_force


def test_what_a_worker_could_not_start_for_is_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch of this processor')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = misled(tmp_path)
    said = worker.death()
    assert said.startswith("the worker ended with exit code 1")
    assert "no torch of this processor" in said
    assert worker.failed
    worker.end()
