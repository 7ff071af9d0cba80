"""The protocol between a benchmark and its contestants, with processes that misbehave."""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks.contestants import process
from dora_rl.benchmarks.contestants.process import (
    Contestant,
    ContestantFailed,
    ContestantGroup,
    Start,
    start_all,
)
from dora_rl.benchmarks.reporting import Reporter
from tests.benchmarks import stubs

CODE = """
import os, subprocess, sys, time

class One:
    def echo(self, **given):
        return given

    def noise(self):
        print('{"id": 1, "done": "a lie"}', flush=True)
        os.write(1, b'{"id": 2, "done": "another"}\\n')
        subprocess.run(["echo", "from a child"])
        return "the truth"

    def read(self):
        return sys.stdin.read()

    def raises(self):
        raise ValueError("nine is not a number")

    def dies(self, number):
        print("one", "two", "three", sep="\\n", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)

    def quits(self):
        os._exit(0)

    def sleeps(self):
        time.sleep(60)

    def spawns(self):
        return subprocess.Popen(["sleep", "60"]).pid

    def works(self, seconds):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

def load(broken=False):
    if broken:
        raise RuntimeError("cannot load")
    return One()
"""


@contextmanager
def loaded(folder: Path, name: str = "one") -> Iterator[Contestant]:
    with Contestant(stubs.start(folder, name, CODE), folder) as contestant:
        contestant.load()
        yield contestant


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_requests_are_answered_in_order(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        assert one.ask("echo", a=[1, 2], b="ä\n") == {"a": [1, 2], "b": "ä\n"}
        assert one.ask("echo") == {}


def test_what_a_contestant_prints_is_no_answer(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        assert one.ask("noise") == "the truth"
        assert one.ask("echo", x=1) == {"x": 1}
    assert "from a child" in (tmp_path / "one.stderr").read_text()


def test_noise_before_the_contestant_runs_is_skipped(tmp_path: Path) -> None:
    """As of an interpreter that greets: the pipe is not ours yet."""
    lines = [
        "hello",
        "",
        "7",
        "null",
        "[]",
        '{"id": 1}',
        '{"id": 9, "done": 1}',
        '{"id": ',
        "\\377",
    ]
    shell = "".join(f"printf '%b\\n' '{line}'; " for line in lines) + 'exec "$@"'
    plain = stubs.start(tmp_path, "one", CODE)
    noisy = Start("one", ["sh", "-c", shell, "sh", *plain.python], plain.file)
    with Contestant(noisy, tmp_path) as one:
        one.load()
        assert one.ask("echo", x=1) == {"x": 1}


def test_a_contestant_cannot_read_the_requests_of_others(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        one.send("read")
        assert one.receive(timeout_s=10) == ""
        assert one.ask("echo", x=1) == {"x": 1}


def test_a_death_is_named_with_its_signal_and_last_words(tmp_path: Path) -> None:
    with loaded(tmp_path) as one, pytest.raises(ContestantFailed) as failure:
        one.ask("dies", number=4)
    assert str(failure.value) == (
        "one died of SIGILL when asked to `dies`. Its last output: one | two | three"
    )


def test_an_error_is_named_with_its_code_and_message(tmp_path: Path) -> None:
    with loaded(tmp_path) as one, pytest.raises(ContestantFailed) as failure:
        one.ask("raises")
    assert "one ended with code 1 when asked to `raises`." in str(failure.value)
    assert str(failure.value).endswith("ValueError: nine is not a number")


def test_one_that_leaves_without_a_word(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        with pytest.raises(ContestantFailed, match=r"ended with code 0 .* It printed nothing"):
            one.ask("quits")
        with pytest.raises(ContestantFailed, match="ended with code 0"):
            one.ask("echo")


def test_one_that_cannot_load(tmp_path: Path) -> None:
    start = stubs.start(tmp_path, "one", CODE, broken=True)
    with pytest.raises(ContestantFailed, match="cannot load"), ExitStack() as stack:
        start_all(stack, [start], tmp_path, Reporter())


def test_a_hang_has_an_end(tmp_path: Path) -> None:
    late = pytest.raises(ContestantFailed, match=r"one did not answer to `sleeps` within 0\.2 s")
    with late, loaded(tmp_path) as one:
        one.send("sleeps")
        one.receive(timeout_s=0.2)


def test_after_an_interrupt_nothing_is_left(tmp_path: Path) -> None:
    pids = []
    with pytest.raises(KeyboardInterrupt), loaded(tmp_path) as one:
        pids = [one._child.pid, one.ask("spawns")]
        assert all(map(alive, pids))
        one.send("sleeps")
        raise KeyboardInterrupt
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))


def test_at_the_end_a_contestant_leaves_in_peace(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        pass
    assert one._child.returncode == 0


def test_one_that_will_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_S", 0.1)
    with loaded(tmp_path) as one:
        one.send("sleeps")
    assert one._child.returncode == -9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processor time is in /proc")
def test_processor_time_is_seen_and_an_idle_one_settles(tmp_path: Path) -> None:
    with loaded(tmp_path) as one:
        before = one.cpu_s()
        one.ask("works", seconds=0.2)
        after = one.cpu_s()
        assert before is not None and after is not None
        assert after - before >= 0.15
        assert one.settle()


def test_one_whose_processor_time_grows_does_not_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_SETTLE_LIMIT_S", 0.3)
    with loaded(tmp_path) as one:
        spinning = itertools.count(0.0, process._SETTLE_S)
        monkeypatch.setattr(one, "cpu_s", lambda: next(spinning))
        assert not one.settle()
        monkeypatch.setattr(one, "cpu_s", lambda: 7.0)
        assert one.settle()
        monkeypatch.setattr(one, "cpu_s", lambda: None)  # the system does not tell
        assert one.settle()


class Member:
    """A contestant whose processor time is told by the test."""

    def __init__(self, name: str) -> None:
        self.name, self.used_s = name, 0.0

    def ask(self, request: str, **given: Any) -> None:
        for member, seconds in given.items():
            MEMBERS[member].used_s += seconds

    def cpu_s(self) -> float:
        return self.used_s

    def settle(self) -> bool:
        return True


MEMBERS = {name: Member(name) for name in ("quiet", "spinner")}


def test_one_that_spins_while_another_works_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 10.0)  # each request takes ten seconds
    monkeypatch.setattr(process.time, "monotonic", lambda: next(now))
    company = ContestantGroup(list(MEMBERS.values()))  # type: ignore[arg-type]
    company.ask("quiet", "work", quiet=9.0, spinner=4.0)
    company.ask("spinner", "work", spinner=9.0)
    assert company.idle_shares() == {"quiet": 0.0, "spinner": 0.4}


def test_each_is_loaded_in_turn_and_ended_with_the_stack(tmp_path: Path) -> None:
    told = stubs.Told()
    with ExitStack() as stack:
        starts = [stubs.start(tmp_path, name) for name in ("a", "b")]
        members = start_all(stack, starts, tmp_path, told)
        assert [member.ask("about")["version"] for member in members] == ["1", "1"]
        pids = [member._child.pid for member in members]
    assert told.lines == ["loading a", "loading b"]
    assert not any(map(alive, pids))


def test_what_a_contestant_writes_to_its_temporary_directory_goes_with_ours(
    tmp_path: Path,
) -> None:
    code = """
import tempfile

def load():
    return type("One", (), {"place": staticmethod(tempfile.gettempdir)})
"""
    with Contestant(stubs.start(tmp_path, "one", code), tmp_path) as one:
        one.load()
        assert one.ask("place") == os.fspath(tmp_path)
