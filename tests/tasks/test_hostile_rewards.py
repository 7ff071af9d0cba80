"""Rewards that attack: each has one recorded outcome, and all others continue."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.machine.fast_paths import on_linux
from dora_rl.sandbox import isolation, linux, worker_pool, zygote_start
from dora_rl.sandbox.protocol import Isolation, UserFunction
from dora_rl.tasks.environment_pool import EnvironmentPool
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool
from tests.isolation import skip_weaker
from tests.patience import PATIENCE_S
from tests.tasks import hostile
from tests.tasks.processes import (
    descendants,
    eventually,
    named,
    processes,
    time_limit,
    zygote_of,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away"),
]

TIMEOUT_S = 1.0  # of those that are to run into it; a busy machine must not
FULL = Isolation(
    network="namespace",
    calls="filtered",
    privileges="none",
    memory="limited",
    processes="apart",
    forks="limited",
    writes="scratch",
    attributes="mounts",
    private="hidden",
    answers="own",
    driver="hidden",
)


def pool_of(function: Any, **settings: Any) -> ScorePool:
    settings = {"workers": 1, "timeout_s": PATIENCE_S, "memory_mb": 128} | settings
    return ScorePool([UserFunction(name="act", function=function)], **settings)


def job(pool: ScorePool, attack: str, **example: Any) -> ScoreJob:
    example |= {"driver": os.getpid(), "zygote": zygote_of(pool)}
    return ScoreJob(response=attack, example=example)


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Secrets in the environment and in a home directory."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("key")
    (home / ".netrc").write_text("password")
    with pytest.MonkeyPatch.context() as patch:
        for name in hostile.FORBIDDEN:
            patch.setenv(name, hostile.SECRET)
        patch.setenv("HOME", str(home))
        patch.setattr(worker_pool, "_EXIT_REPORT_S", PATIENCE_S)
        yield home


def _held(pool: ScorePool) -> Iterator[ScorePool]:
    with pool:
        zygote, promised = zygote_of(pool), pool.isolation
        yield pool
        assert (zygote_of(pool), pool.isolation) == (zygote, promised), "it was lost on the way"
        assert eventually(lambda: bool(descendants(zygote))), "a lost worker is replaced"
        everybody = descendants(zygote) | {zygote}
        scratch = Path(pool._workers._zygote._scratch)
        assert scratch.is_dir()
    assert not everybody & set(processes()), "a closed pool leaves nobody behind"
    assert not scratch.exists()


@pytest.fixture(scope="module")
def pool(surroundings: Path) -> Iterator[ScorePool]:
    """Workers as they are, of a reward that is imported by name."""
    yield from _held(pool_of("tests.tasks.hostile:act"))


@pytest.fixture(scope="module")
def forked(surroundings: Path) -> Iterator[ScorePool]:
    """Of one that exists in this process alone: a fork of it."""
    act = hostile.act
    yield from _held(pool_of(lambda response, example: act(response, example)))


@pytest.fixture(scope="module")
def crowded(surroundings: Path) -> Iterator[ScorePool]:
    """On a system that gives no namespaces: a fork has the patch as well."""
    act = hostile.act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linux, "unshare", lambda what: False)
        pool = pool_of(lambda response, example: act(response, example))
    yield from _held(pool)


@pytest.fixture(scope="module")
def bare(surroundings: Path) -> Iterator[ScorePool]:
    """On a system that gives nothing but processes."""
    act = hostile.act
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "unshare",
            "mount",
            "drop_capabilities",
            "set_dumpable",
            "filter_calls",
            "confine_files",
        ):
            patch.setattr(linux, name, lambda *_, **__: False)
        pool = pool_of(lambda response, example: act(response, example))
    yield from _held(pool)


@pytest.fixture(scope="module")
def forged(surroundings: Path) -> Iterator[ScorePool]:
    yield from _held(pool_of("tests.tasks.hostile:act"))


TIMED_OUT = f"timeout after {TIMEOUT_S} s"
# What is told of an attack, whatever the system keeps away.
OUTCOMES = {
    "loop": TIMED_OUT,
    "backtracking": TIMED_OUT,
    "deaf": TIMED_OUT,
    "memory bomb": "reward `act` raised MemoryError",
    "mapped bomb": r"reward `act` raised OSError: \[Errno 12\]",
    "kill group": "the worker was killed by SIGKILL",
    "close files": "the worker closed its socket|the worker exited with code 0",
    "exhaust files": r"reward `act` raised OSError: \[Errno 24\] Too many open files",
    "system exit": "reward `act` raised SystemExit: 0",
    "interrupt": "reward `act` raised KeyboardInterrupt",
    "base exception": "reward `act` raised BaseException: odd",
    "generator exit": "reward `act` raised GeneratorExit",
    "unspeakable": "reward `act` raised what cannot be shown",
    "float raises": "what a reward returned raised ZeroDivisionError",
    "float exits": "what a reward returned raised SystemExit: 0",
    "float hangs": TIMED_OUT,
    "float of a part exits": "the worker exited with code 4",
    "recursion": "reward `act` raised RecursionError",
    "C recursion": "SIGSEGV|RecursionError|MemoryError",
    "segfault": "the worker was killed by SIGSEGV",
    "abort": "the worker was killed by SIGABRT",
}
FORGERIES = {
    "forged infinity": "the worker's answer cannot be read|not finite",
    "forged part": "the worker's answer cannot be read|not finite",
    "forged nesting": "the worker's answer cannot be read",
    "forged failure": "^(x )+x…$",
    "forged nothing": "the worker's answer cannot be read",
}


def attacked(pool: ScorePool, attack: str, **example: Any) -> Outcome:
    """What becomes of it; if it never ends, soon."""
    endless = OUTCOMES.get(attack) == TIMED_OUT
    with time_limit(pool, TIMEOUT_S if endless else PATIENCE_S):
        return pool.run(job(pool, attack, **example))


def check_failed(pool: ScorePool, outcome: Outcome, reason: str) -> None:
    assert outcome.reward != outcome.reward, outcome
    assert outcome.failure is not None and re.search(reason, outcome.failure), outcome
    assert len(outcome.failure) <= 1000
    assert 0 <= outcome.seconds < PATIENCE_S
    assert pool.run(job(pool, "good")).reward == 1.0
    assert pool.outstanding == 0


@pytest.mark.parametrize("attack", OUTCOMES)
def test_an_attack_is_a_failure_of_its_own_job(pool: ScorePool, attack: str) -> None:
    check_failed(pool, attacked(pool, attack), OUTCOMES[attack])


@pytest.mark.parametrize("attack", FORGERIES)
def test_an_answer_that_is_forged_is_not_believed(forged: ScorePool, attack: str) -> None:
    outcome = forged.run(job(forged, attack))
    assert outcome.failure is not None and re.search(FORGERIES[attack], outcome.failure)
    assert len(outcome.failure) <= 1000
    # Who forged it is still at it, and fails the next one; then it is over.
    with time_limit(forged, TIMEOUT_S):
        assert forged.run(job(forged, "good")).failure == TIMED_OUT
    assert forged.run(job(forged, "good")).reward == 1.0


def test_a_worker_may_lie_about_its_time_in_vain(forged: ScorePool) -> None:
    outcome = forged.run(job(forged, "forged time"))
    assert outcome.reward == 1.0
    assert 0 <= outcome.seconds < PATIENCE_S
    with time_limit(forged, TIMEOUT_S):
        assert forged.run(job(forged, "good")).failure == TIMED_OUT


def test_a_copy_of_a_worker_does_not_answer_for_it(pool: ScorePool) -> None:
    assert pool.run(job(pool, "fork and return")).reward == 1.0
    assert pool.run(job(pool, "nap", seconds=0.2)).reward == 1.0


def test_an_answer_counts_for_its_own_request_alone() -> None:
    with pool_of("tests.tasks.hostile:act") as fresh:
        assert fresh.run(job(fresh, "answer later")).reward == 1.0
        outcome = fresh.run(job(fresh, "next one"))
        assert outcome.failure == "the worker sent what is not a message"
        assert fresh.run(job(fresh, "good")).reward == 1.0


def test_a_program_that_cannot_be_loaded_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "fragile.py"
    module.write_text("def act(response): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pool_of("fragile:act") as pool:
        assert pool.run(ScoreJob(response="")).reward == 1.0
        module.write_text("no python")
        os.kill(zygote_of(pool), 9)
        assert eventually(lambda: "SyntaxError" in str(pool.run(ScoreJob(response="")).failure))


def test_a_system_that_gives_no_process_any_more_is_no_accident_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "no room")

    with pool_of("tests.tasks.hostile:act") as pool:
        assert pool.run(job(pool, "good")).reward == 1.0
        pool.submit(1, job(pool, "nap", seconds=600))
        monkeypatch.setattr(zygote_start.subprocess, "Popen", refuse)
        os.kill(zygote_of(pool), 9)
        (outcome,) = pool.poll(PATIENCE_S)
        assert outcome.failure == "the process of all workers was killed"
        assert "no room" in str(pool.run(job(pool, "good")).failure)


@pytest.mark.parametrize("kind", ["forked", "crowded", "bare"])
@pytest.mark.parametrize("attack", ["loop", "unspeakable", "segfault", "close files"])
def test_whatever_the_system_gives(kind: str, attack: str, request: pytest.FixtureRequest) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    check_failed(pool, attacked(pool, attack), OUTCOMES[attack])


def test_this_system_gives_everything(pool: ScorePool, forked: ScorePool) -> None:
    """Where it does not, the tests that need it say so here and not by failing one by one."""
    if pool.isolation != FULL:
        skip_weaker(f"this system gives less: {pool.isolation}")
    assert forked.isolation == FULL


def test_what_is_not_in_force_is_not_claimed(crowded: ScorePool, bare: ScorePool) -> None:
    found = crowded.isolation
    assert (found.processes, found.forks) == ("shared", "unlimited")
    assert found.network in ("filter", "python")
    told = bare.isolation
    assert told == Isolation(
        network="python",
        privileges="inherited",
        memory="limited",
        processes="shared",
        forks="unlimited",
        writes="anywhere",
        driver="readable",
    )


def needs(pool: ScorePool, **wanted: str) -> None:
    for name, value in wanted.items():
        if getattr(pool.isolation, name) != value:
            skip_weaker(f"{name} is {getattr(pool.isolation, name)} here")


# --- processes


def test_a_fork_bomb_ends_with_its_worker(pool: ScorePool) -> None:
    needs(pool, processes="apart", forks="limited")
    name = f"bomb-{secrets.token_hex(3)}"
    with time_limit(pool, TIMEOUT_S):
        outcome = pool.run(job(pool, "fork bomb", name=name))
    # Any of the copies may end first, or none: one outcome in any case.
    assert outcome.failure is not None
    assert eventually(lambda: not named(name))
    assert eventually(lambda: len(descendants(zygote_of(pool))) == 2)
    assert pool.run(job(pool, "good")).reward == 1.0


@pytest.mark.parametrize("kind", ["pool", "forked", "crowded", "bare"])
def test_a_daemon_does_not_outlive_its_job_for_long(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    name = f"daemon-{secrets.token_hex(3)}"
    assert pool.run(job(pool, "daemon", name=name)).reward == 1.0
    assert eventually(lambda: not named(name))


@pytest.mark.parametrize("attack", ["kill parent", "stop parent"])
def test_the_parent_cannot_be_hurt(pool: ScorePool, attack: str) -> None:
    needs(pool, processes="apart")
    before = zygote_of(pool)
    outcome = pool.run(job(pool, attack))  # without effect, or refused by a newer kernel
    assert outcome.reward == 1.0 or "PermissionError" in str(outcome.failure)
    assert pool.run(job(pool, "good")).reward == 1.0
    assert zygote_of(pool) == before


@pytest.mark.parametrize("kind", ["pool", "forked", "crowded"])
@pytest.mark.parametrize("attack", ["kill all", "kill driver", "kill zygote"])
def test_nobody_outside_can_be_signalled(
    kind: str, attack: str, request: pytest.FixtureRequest
) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    if kind == "crowded" and attack != "kill all":
        needs(pool, writes="scratch")  # Landlock, of Linux 6.12 or newer
    check_failed(pool, pool.run(job(pool, attack)), "PermissionError|ProcessLookupError")


def test_a_zygote_that_is_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing protects it; here by the test."""
    act = hostile.act
    monkeypatch.setattr(linux, "unshare", lambda what: False)
    with pool_of(lambda response, example: act(response, example)) as pool:
        before = zygote_of(pool)
        pool.submit(1, job(pool, "loop"))
        assert eventually(lambda: not pool.poll(0.05) and bool(descendants(before)))
        everybody = descendants(before) | {before}
        os.kill(before, 9)
        (outcome,) = pool.poll(PATIENCE_S)
        assert outcome.failure == "the process of all workers was killed"
        assert pool.run(job(pool, "good")).reward == 1.0
        assert zygote_of(pool) != before
        assert eventually(lambda: not everybody & set(processes()))


def test_a_zygote_that_is_stopped_is_replaced() -> None:
    with pool_of("tests.tasks.hostile:act") as pool:
        assert pool.run(job(pool, "good")).reward == 1.0
        before = zygote_of(pool)
        os.kill(before, 19)
        assert attacked(pool, "loop").failure == TIMED_OUT
        for worker in pool._workers._workers.values():
            worker.wanted_at -= worker_pool._START_S  # it has waited for its start long enough
        assert pool.run(job(pool, "good")).reward == 1.0
        assert zygote_of(pool) != before
        assert before not in processes()


def test_siblings_are_out_of_reach() -> None:
    with pool_of("tests.tasks.hostile:act", workers=2) as pool:
        needs(pool, processes="apart")
        pool.submit(1, job(pool, "nap", seconds=0.5))
        pool.submit(2, job(pool, "reach others"))
        outcomes: list[Outcome] = []
        while pool.outstanding:
            outcomes += pool.poll(PATIENCE_S)
    assert {outcome.ticket: outcome.reward for outcome in outcomes} == {1: 1.0, 2: 0.0}


# --- secrets


@pytest.mark.parametrize("kind", ["pool", "forked", "crowded"])
def test_secrets_are_nowhere_to_be_read(kind: str, request: pytest.FixtureRequest) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    needs(pool, driver="hidden")
    assert all(os.environ[name] == hostile.SECRET for name in hostile.FORBIDDEN)
    assert pool.run(job(pool, "spy")).reward == 0.0
    assert pool.run(job(pool, "read memory")).reward == 0.0


def test_the_files_of_secrets_are_empty(pool: ScorePool, surroundings: Path) -> None:
    needs(pool, processes="apart")
    private = str(surroundings / ".ssh")
    assert pool.run(job(pool, "unmount", private=private)).reward == 0.0
    assert pool.run(job(pool, "unmount", private=str(surroundings))).reward == 0.0
    assert (surroundings / ".ssh" / "id").read_text() == "key"


def test_what_a_driver_had_at_its_start_is_forgotten_by_its_fork() -> None:
    """Also what it has changed or removed since: the system still shows the old one."""
    program = """
        import os
        os.environ["HF_TOKEN"] = "another"
        del os.environ["MY_SECRET"]
        from dora_rl.tasks.scores import ScoreJob, ScorePool
        from dora_rl.sandbox.protocol import UserFunction
        from pathlib import Path
        def shown(response):
            known = Path("/proc/self/environ").read_bytes() + repr(os.environ).encode()
            assert b"HOME" in known
            return float(known.count(b"swordfish") + known.count(b"another"))
        with ScorePool([UserFunction(name="act", function=shown)], workers=1) as pool:
            print(pool.run(ScoreJob(response="")))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "reward=0.0" in done.stdout


def test_the_environment_is_a_list_of_what_is_known() -> None:
    given = dict.fromkeys((*hostile.FORBIDDEN, "LC_ALL", "PATH", "ANYTHING"), "x")
    kept = isolation.clean_environment(given)
    assert kept.keys() - {"PYTHONHASHSEED"} == {
        *("LC_ALL", "PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }


# --- network


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("sockets")
    name = secrets.token_hex(8)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
    ):
        unix.bind(str(directory / "unix"))
        abstract.bind("\0" + name)
        datagram.bind(str(directory / "datagram"))
        for server in (unix, abstract):
            server.listen()
        yield {
            "port": tcp.getsockname()[1],
            "address": str(directory / "unix"),
            "abstract": name,
            "datagram": str(directory / "datagram"),
        }


@pytest.mark.parametrize("kind", ["pool", "crowded"])
@pytest.mark.parametrize(
    "attack", ["tcp", "udp", "unix", "abstract", "datagram pair", "raw socket call"]
)
def test_there_is_no_socket_to_anywhere(
    kind: str, attack: str, servers: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    if pool.isolation.network == "python":
        skip_weaker("no filter of calls for this processor")
    check_failed(pool, pool.run(job(pool, attack, **servers)), "PermissionError")


def test_sockets_are_there_if_they_are_asked_for(servers: dict[str, Any]) -> None:
    with pool_of("tests.tasks.hostile:act", network=True) as pool:
        assert pool.isolation.network == "open"
        for attack in ("tcp", "udp", "unix", "datagram pair", "raw socket call"):
            assert pool.run(job(pool, attack, **servers)).reward == 1.0, attack
        # The rest holds all the same.
        assert pool.run(job(pool, "spy")).reward == 0.0
        assert "PermissionError" in str(pool.run(job(pool, "kill all")).failure)


# --- files


@pytest.mark.parametrize("kind", ["pool", "forked", "crowded"])
def test_nothing_is_written_outside(
    kind: str, tmp_path: Path, surroundings: Path, request: pytest.FixtureRequest
) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    needs(pool, writes="scratch")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directories = [str(tmp_path), str(surroundings), os.getcwd(), "/tmp", "/", "/etc"]
    example = {"directories": directories, "files": [str(victim)]}
    assert pool.run(job(pool, "write outside", **example)).reward == 0.0
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["pool", "forked", "crowded", "bare"])
def test_what_is_written_inside_goes_with_the_worker(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pool: ScorePool = request.getfixturevalue(kind)
    assert pool.run(job(pool, "write inside")).reward == 1.0
    assert pool.run(job(pool, "look for note")).reward == 1.0
    pool.run(job(pool, "system exit"))
    assert pool.run(job(pool, "look for note")).reward == 0.0


def test_a_link_out_of_the_scratch_directory_is_not_followed(
    bare: ScorePool, tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("precious")
    outcome = bare.run(job(bare, "link out", directory=str(tmp_path)))
    assert outcome.failure == "the worker exited with code 5"
    assert bare.run(job(bare, "good")).reward == 1.0
    assert (tmp_path / "kept").read_text() == "precious"
    scratch = Path(bare._workers._zygote._scratch)
    assert eventually(lambda: len(list(scratch.iterdir())) == 1)  # of the next worker


def test_the_scratch_directory_has_an_end() -> None:
    with pool_of("tests.tasks.hostile:act") as pool:
        needs(pool, processes="apart")
        assert 0 < pool.run(job(pool, "fill scratch")).reward <= 256


def test_more_may_be_made_writable(tmp_path: Path) -> None:
    with pool_of("tests.tasks.hostile:act", writable=(str(tmp_path),)) as pool:
        example = {"directories": [str(tmp_path)], "files": []}
        assert pool.run(job(pool, "write outside", **example)).reward == 1.0
    assert (tmp_path / "left-by-a-reward").read_text() == "x"


def test_output_without_end_goes_nowhere(
    pool: ScorePool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pool.run(job(pool, "print")).reward == 1.0
    assert capfd.readouterr() == ("", "")


def test_limits_cannot_be_taken_back(pool: ScorePool) -> None:
    assert pool.run(job(pool, "raise limits")).reward == 0.0


def test_a_worker_that_ran_out_of_files_is_replaced(pool: ScorePool) -> None:
    pool.run(job(pool, "write inside"))
    pool.run(job(pool, "exhaust files"))
    assert pool.run(job(pool, "look for note")).reward == 0.0


# --- environments, and users without privileges


class Arena:
    def reset(self, example: dict[str, Any]) -> str:
        self.example = example
        return "go"

    def step(self, text: str) -> tuple[str, float, bool]:
        return str(hostile.act(text, self.example)), 0.0, False


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("loop", TIMED_OUT),
        ("segfault", "the worker was killed by SIGSEGV"),
        ("unspeakable", "step raised what cannot be shown"),
        ("tcp", "PermissionError|ConnectionRefused|OSError"),
        ("close files", OUTCOMES["close files"]),
    ],
)
def test_environments_are_held_in_the_same_way(
    arena: EnvironmentPool, attack: str, reason: str
) -> None:
    for ticket in (1, 2):
        arena.open(ticket, {"port": 9})
        assert [reply.observation for reply in arena.poll(PATIENCE_S)] == ["go"]
    arena.step(1, attack)
    with time_limit(arena, TIMEOUT_S if reason == TIMED_OUT else PATIENCE_S):
        reply, *_ = arena.poll(PATIENCE_S)
    assert reply.failure is not None and re.search(reason, reply.failure)
    for ticket in (1, 2):
        arena.discard(ticket)
    arena.open(3, {})
    assert [reply.observation for reply in arena.poll(PATIENCE_S) if reply.ticket == 3] == ["go"]
    arena.discard(3)


@pytest.fixture(scope="module")
def arena(surroundings: Path) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(
        UserFunction(name="arena", function=lambda: Arena()),
        workers=1,
        timeout_s=PATIENCE_S,
        memory_mb=256,
    ) as pool:
        yield pool


def test_an_ordinary_user_is_protected_as_well() -> None:
    if not shutil.which("unshare"):
        skip_weaker("needs util-linux")
    program = """
        from dora_rl.tasks.scores import ScoreJob, ScorePool
        from dora_rl.sandbox.protocol import UserFunction
        import os
        part = UserFunction(name="act", function="tests.tasks.hostile:act")
        with ScorePool([part], workers=1, timeout_s=120) as pool:
            example = {"driver": os.getpid(), "directories": ["/tmp"], "files": [], "port": 9}
            told = [pool.run(ScoreJob(response=attack, example=example)).reward
                    for attack in ("spy", "read memory", "write outside", "good")]
            print(os.geteuid(), told, pool.isolation)
    """
    command = ["unshare", "-U", "--map-user=1000", "--map-group=1000", sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    if done.returncode and "unshare" in done.stderr:
        skip_weaker("no namespaces of users here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1000 [0.0, 0.0, 0.0, 1.0]"), done.stdout
    assert str(FULL) in done.stdout


def test_a_program_that_cannot_start_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(zygote_start.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(zygote_start.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(FileNotFoundError):
        pool_of("tests.tasks.hostile:act")
    assert list(tmp_path.iterdir()) == []
