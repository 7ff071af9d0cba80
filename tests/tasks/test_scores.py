"""Rewards in processes: whatever a reward does, its own job alone fails, and says why."""

import asyncio
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dora_rl.machine.fast_paths import PORTABLE, on_linux
from dora_rl.sandbox import worker_pool, zygote
from dora_rl.sandbox.errors import LoadError
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool
from tests.patience import PATIENCE_S
from tests.tasks import samples
from tests.tasks.processes import (
    descendants,
    eventually,
    named,
    processes,
    time_limit,
    zygote_of,
)

LINUX = pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away")

TIMEOUT_S = 0.5  # of what never ends; a busy machine may take long for all else
TIMED_OUT = f"timeout after {TIMEOUT_S} s"


def pool_of(function: Any, **settings: Any) -> ScorePool:
    settings = {"workers": 1, "timeout_s": PATIENCE_S, "memory_mb": 256} | settings
    return ScorePool([UserFunction(name="act", function=function)], **settings)


def job(response: str, **example: Any) -> ScoreJob:
    return ScoreJob(response=response, example=example)


def run(pool: ScorePool, what: str) -> Outcome:
    """A job's outcome; of one that never ends, soon."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "hang up":
            patch.setattr(worker_pool, "_EXIT_REPORT_S", 0.2)
        with time_limit(pool, TIMEOUT_S if what in ("hang", "spin") else PATIENCE_S):
            return pool.run(job(what))


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DORA_TEST_SECRET", "swordfish")
        patch.setattr(worker_pool, "_EXIT_REPORT_S", PATIENCE_S)
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[ScorePool]:
    with pool_of("tests.tasks.samples:act") as pool:
        yield pool


@pytest.fixture(scope="module")
def forked() -> Iterator[ScorePool]:
    only_here = samples.act
    with pool_of(lambda response, example: only_here(response, example)) as pool:
        yield pool


BAD = {
    "raise": "reward `act` raised ValueError: no such luck",
    "nan": "reward `act` returned `nan`. Return a finite number.",
    "infinite": "reward `act.b` returned `-inf`. Return a finite number.",
    "text": "reward `act` returned no number: `'1.0'`. Return a float.",
    "nothing": "reward `act` returned no number: `None`. Return a float.",
    "empty": "reward `act` returned no number: `{}`. Return one.",
    "exit": "reward `act` raised SystemExit: 3",
    "vanish": "the worker exited with code 3",
    "crash": "the worker was killed by SIGSEGV",
    "hang": TIMED_OUT,
    "spin": TIMED_OUT,
    "hang up": "the worker closed its socket",
    "babble": "the worker sent what is not a message",
    "surrogate": "reward `act` raised KeyError: 'x'",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reward_fails_alone_and_says_why(pool: ScorePool, what: str) -> None:
    outcome = run(pool, what)
    assert outcome.failure == BAD[what]
    assert outcome.reward != outcome.reward
    assert pool.run(job("good")).reward == 1.0


@pytest.mark.parametrize("what", ["raise", "nan", "vanish", "hang", "exit"])
def test_a_closure_fails_alone_and_says_why(forked: ScorePool, what: str) -> None:
    assert run(forked, what).failure == BAD[what]
    assert forked.run(job("good")).reward == 1.0


def test_deep_recursion_is_a_failure(pool: ScorePool) -> None:
    assert "RecursionError" in str(pool.run(job("deep")).failure)


@LINUX
@pytest.mark.parametrize("kind", ["pool", "forked"])
def test_memory_is_bounded(kind: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(kind)
    assert pool.isolation.memory == "limited"
    assert pool.run(job("memory")).failure == "reward `act` raised MemoryError"
    assert pool.run(job("good")).reward == 1.0


def test_files_are_bounded(pool: ScorePool) -> None:
    assert "File too large" in str(pool.run(job("write")).failure)


@LINUX
@pytest.mark.parametrize("escape", [False, True])
def test_what_a_reward_starts_dies_with_it(pool: ScorePool, escape: bool) -> None:
    name = f"child-{secrets.token_hex(3)}"
    pool.run(job("good"))  # a worker is there, and is asked at once
    pool.submit(1, job("child", name=name, escape=escape))
    assert eventually(lambda: bool(named(name)))
    with time_limit(pool, TIMEOUT_S):
        assert [outcome.failure for outcome in pool.poll(PATIENCE_S)] == [BAD["hang"]]
    assert eventually(lambda: not named(name))


@pytest.mark.parametrize("kind", ["pool", "forked"])
def test_there_is_no_network(kind: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(kind)
    assert pool.isolation.network in ("namespace", "filter", "python")
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = pool.run(job("connect", port=server.getsockname()[1]))
    assert "reward `act` raised" in str(outcome.failure)


def test_network_can_be_allowed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pool_of("tests.tasks.samples:act", network=True) as pool,
    ):
        assert pool.isolation.network == "open"
        assert pool.run(job("connect", port=server.getsockname()[1])).reward == 1.0


@pytest.mark.parametrize("kind", ["pool", "forked"])
def test_secrets_stay_with_the_driver(kind: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(kind)
    assert os.environ["DORA_TEST_SECRET"]
    assert pool.run(job("secret")).reward == 0.0


@LINUX
@pytest.mark.parametrize("kind", ["pool", "forked"])
def test_the_system_does_not_tell_secrets(kind: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(kind)
    assert pool.run(job("own environment")).reward == 0.0


@LINUX
def test_a_fork_forgets_the_environment_that_the_driver_began_with() -> None:
    program = """
        from dora_rl.tasks.scores import ScoreJob, ScorePool
        from dora_rl.sandbox.protocol import UserFunction
        from tests.tasks.samples import act
        own = lambda response, example: act(response, example)
        with ScorePool([UserFunction(name="act", function=own)], workers=1) as pool:
            print(pool.run(ScoreJob(response="own environment")).reward)
            print(pool.run(ScoreJob(response="secret")).reward)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    env = {**os.environ, "DORA_TEST_SECRET": "swordfish"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "0.0\n0.0\n"


def test_a_worker_is_replaced_after_what_it_cannot_be_trusted_after(pool: ScorePool) -> None:
    first = pool.run(job("who")).reward
    pool.run(job("raise"))
    assert pool.run(job("who")).reward == first
    for what in ("exit", "hang", *(["memory"] if on_linux() else [])):
        before = pool.run(job("who")).reward
        run(pool, what)
        assert pool.run(job("who")).reward != before


def test_output_goes_nowhere(pool: ScorePool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.run(job("print")).reward == 1.0
    assert capfd.readouterr() == ("", "")


def test_every_job_has_exactly_one_outcome() -> None:
    kinds = ["good", "hang", "good", "vanish", "raise", "good", "crash", "exit", "nan", "good"]
    with pool_of("tests.tasks.samples:act", workers=2) as pool:
        wanted = {ticket: kinds[ticket % len(kinds)] for ticket in range(40)}
        for ticket, what in wanted.items():
            pool.submit(ticket, job(what))
        assert pool.outstanding == 40
        outcomes: list[Outcome] = []
        while pool.outstanding:
            for worker, ticket in pool._running.items():
                if wanted[ticket] == "hang":  # long enough
                    pool._workers._workers[worker].asked_at = -PATIENCE_S
            outcomes += pool.poll(PATIENCE_S)
        assert sorted(outcome.ticket for outcome in outcomes) == list(wanted)
        assert pool.poll() == []
    for outcome in outcomes:
        what = wanted[outcome.ticket]
        why = BAD.get(what, "").replace(f"{TIMEOUT_S} s", f"{PATIENCE_S} s")
        assert outcome.failure == why or what == "good"
        assert (outcome.reward == 1.0) == (what == "good") == (outcome.failure is None)


def test_a_hang_does_not_hold_up_the_other_worker() -> None:
    with pool_of("tests.tasks.samples:act", workers=2) as pool:
        pool.submit(0, job("hang"))
        for _ in range(20):
            assert pool.run(job("good")).reward == 1.0
        assert pool.poll() == []


def test_outcomes_of_others_stay_for_poll(pool: ScorePool) -> None:
    pool.submit(7, job("good"))
    assert pool.run(job("raise")).failure == BAD["raise"]
    assert [outcome.ticket for outcome in pool.poll(PATIENCE_S)] == [7]


def test_a_ticket_is_out_once(pool: ScorePool) -> None:
    pool.submit(1, job("good"))
    with pytest.raises(ValueError, match=r"ticket 1 is out already"):
        pool.submit(1, job("good"))
    assert len(pool.poll(PATIENCE_S)) == 1


def test_one_number_to_wait_on(pool: ScorePool) -> None:
    pool.run(job("vanish"))
    pool.run(job("good"))  # the next worker is there
    numbers = pool.filenos()
    assert pool.due_in_s() is None
    pool.submit(1, job("good"))
    outcomes: list[Outcome] = []
    while not outcomes:
        assert select.select(numbers, [], [], PATIENCE_S)[0] == numbers
        outcomes = pool.poll()
    assert outcomes[0].reward == 1.0
    assert pool.filenos() == numbers
    pool.submit(2, job("hang"))
    pool.poll(0.05)
    due = pool.due_in_s()
    assert due is not None and 0 < due < PATIENCE_S
    with time_limit(pool, TIMEOUT_S):
        assert pool.poll(PATIENCE_S)[0].failure == BAD["hang"]


def test_the_limit_holds_even_if_nobody_looks() -> None:
    def nap(response: str) -> float:
        time.sleep(0.3)
        return 1.0

    with pool_of(nap, timeout_s=0.1) as pool:
        for ticket in count():
            pool.submit(ticket, job(""))
            pool.poll(0.02)
            if pool.outstanding and (pool.due_in_s() or 1.0) <= 0.1:
                break  # one is at work
        time.sleep(0.5)
        failures = {outcome.failure for outcome in pool.poll(PATIENCE_S)}
    assert failures == {"timeout after 0.1 s"}


def test_large_jobs_and_answers_pass(pool: ScorePool) -> None:
    def size(response: str, example: dict[str, Any]) -> float:
        return float(len(response) + len(example["x"]))

    big = "é" * (3 << 20)
    with pool_of(size) as other:
        assert other.run(job(big, x=big)).reward == 2.0 * len(big)
    with pytest.raises(TaskError, match=r"an example must be JSON"):
        pool.submit(5, job("good", x=object()))
    assert pool.outstanding == 0


def test_numbers_beyond_64_bits_pass() -> None:
    with pool_of(lambda response, example: float(example["x"] == 10**30)) as pool:
        assert pool.run(job("", x=10**30)).reward == 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.tasks.no_such:f", "no module|No module named"),
        ("no_such_module_at_all:f", "no module `no_such_module_at_all`"),
        ("tests.tasks.samples:no_such", "has no `no_such`"),
        ("tests.tasks.samples:NOT_CALLABLE", "must be callable"),
        ("tests.tasks.samples:asks_too_much", "asks for `completion`"),
        ("samples", "must be an import path: `samples`. Write module:function."),
        ("tests.tasks.fails_to_import:f", "ZeroDivisionError: division by zero"),
        ("tests.tasks.exits_at_import:f", "SystemExit: 7"),
        (lambda completion: 1.0, "asks for `completion`"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_once(function: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        pool_of(function)


@pytest.mark.parametrize("portable", ["", "1"])
def test_a_path_need_not_be_text(
    portable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the working directory, which modules are looked for in, and of TMPDIR."""
    for name in (b"caf\xe9", "größe é".encode()):
        directory = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
        try:
            directory.mkdir()
        except OSError:
            pytest.skip("names of files are text here")
        (directory / "found_here.py").write_text("def one(response):\n    return 1.0\n")
        monkeypatch.chdir(directory)
        monkeypatch.setenv(PORTABLE, portable)
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        with pool_of("found_here:one") as pool:
            assert pool.run(job("good")).reward == 1.0


def test_rewards_may_be_asynchronous() -> None:
    with pool_of(samples.slow_length) as pool:
        assert [pool.run(job("x" * n)).reward for n in (1, 5)] == [1.0, 5.0]


def test_a_reward_takes_what_it_names() -> None:
    with pool_of(samples.everything) as pool:
        scored = pool.run(ScoreJob(response="r", prompt="p", example={"x": 1}, answer="a"))
    assert scored.reward == 1.0


def test_several_rewards_are_weighted() -> None:
    spec = [
        UserFunction(name="long", function=samples.length, weight=0.25),
        UserFunction(name="both", function=samples.parts, weight=2.0),
        UserFunction(name="off", function="exact", weight=0.0),
    ]
    with ScorePool(spec, workers=1) as pool:
        outcome = pool.run(ScoreJob(response="four", answer="four"))
    assert outcome.parts == {"long": 4.0, "both.length": 4.0, "both.fixed": 0.5, "off": 1.0}
    assert outcome.reward == 0.25 * 4 + 2 * 4.5


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def score(self, response: str) -> float:
        self.calls += 1
        return float(self.calls)

    def __call__(self, response: str) -> float:
        return self.score(response)


@pytest.mark.parametrize("make", [lambda: Counter(), lambda: Counter().score])
def test_objects_with_state_are_reached_by_a_fork(make: Callable[[], Any]) -> None:
    with pool_of(make()) as pool:
        assert [pool.run(job("")).reward for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_pool_in_a_running_event_loop() -> None:
    async def reward(response: str) -> float:
        await asyncio.sleep(0)
        return 1.0

    async def notebook() -> float:
        with pool_of(reward) as pool:
            return pool.run(job("")).reward

    assert asyncio.run(notebook()) == 1.0


def test_workers_that_cannot_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_work", lambda channel, service: os._exit(9))
    with pool_of(lambda response: 1.0) as pool:  # a fork has the patch as well
        outcome = pool.run(job("good"))
        assert pool.run(job("good")).failure == outcome.failure
    wanted = "5 workers ended before they could start: the worker exited with code 9"
    assert outcome.failure == wanted


def test_closing_ends_all_and_may_be_repeated() -> None:
    pool = pool_of("tests.tasks.samples:act", workers=2)
    pool.run(job("good"))
    pool.submit(1, job("hang"))
    everybody = descendants(zygote_of(pool)) | {zygote_of(pool)}
    assert len(everybody) >= 3
    pool.close()
    pool.close()
    assert not everybody & set(processes())


@LINUX
@pytest.mark.parametrize(
    "how", ["'tests.tasks.samples:act'", "lambda response, example: act(response, example)"]
)
def test_workers_die_with_the_driver(how: str) -> None:
    name = f"child-{secrets.token_hex(3)}"
    program = f"""
        import time
        from dora_rl.tasks.scores import ScoreJob, ScorePool
        from dora_rl.sandbox.protocol import UserFunction
        from tests.tasks.samples import act
        pool = ScorePool([UserFunction(name="act", function={how})], workers=1, timeout_s=600)
        print(pool.run(ScoreJob(response="good")).reward, flush=True)
        pool.submit(1, ScoreJob(response="child", example=dict(name={name!r}, escape=True)))
        pool.poll(600)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout as stdout:
        assert stdout.readline() == "1.0\n"
        assert eventually(lambda: bool(named(name)))
        everybody = descendants(child.pid)
        child.kill()
        child.wait()
    assert len(everybody) >= 3
    assert eventually(lambda: not everybody & set(processes()))
    assert not named(name)


@LINUX
def test_the_zygote_can_be_lost(pool: ScorePool) -> None:
    pool.run(job("good"))
    everybody = descendants(zygote_of(pool)) | {zygote_of(pool)}
    pool.submit(1, job("hang"))
    pool.poll(0.05)
    os.kill(zygote_of(pool), 9)
    (outcome,) = pool.poll(PATIENCE_S)
    assert "killed" in str(outcome.failure)
    assert eventually(lambda: not everybody & set(processes()))
    assert pool.run(job("good")).reward == 1.0


def test_python_blocks_sockets_where_the_system_does_not() -> None:
    program = """
        import asyncio, socket
        from dora_rl.sandbox.isolation import block_sockets
        block_sockets()
        for attempt in (
            lambda: socket.socket(),
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            lambda: socket.create_connection(("127.0.0.1", 1)),
            lambda: socket.getaddrinfo("localhost", 1),
        ):
            try:
                attempt()
            except PermissionError as error:
                assert "reward_network" in str(error)
            else:
                raise SystemExit("not refused")
        asyncio.run(asyncio.sleep(0))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
