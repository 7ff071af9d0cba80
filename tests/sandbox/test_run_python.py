"""Programs of somebody else's: what they get, what they do not, and how they end."""

import math
import os
import secrets
import sys
from pathlib import Path

import pytest

from dora_rl.machine.fast_paths import PORTABLE, on_linux
from dora_rl.sandbox import Execution, SandboxError, run_python
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.scores import ScoreJob, ScorePool
from tests.isolation import EXPECTED, skip_weaker
from tests.ordinary_user import run_as_ordinary_user
from tests.patience import PATIENCE_S
from tests.sandbox import attempts
from tests.tasks.processes import eventually, named

linux_alone = pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away")


@pytest.fixture(params=["", "1"], ids=["fast paths", "portable"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(PORTABLE, request.param)
    value: str = request.param
    return value


def patient(code: str, **settings: object) -> Execution:
    return run_python(code, **{"timeout_s": PATIENCE_S, **settings})  # type: ignore[arg-type]


@pytest.mark.usefixtures("either")
def test_a_program_reads_writes_and_ends() -> None:
    code = "import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)\nraise SystemExit(3)"
    done = patient(code, stdin="hello\n")
    assert (done.stdout, done.stderr, done.returncode) == ("olleh\n", "oops\n", 3)
    assert not done.ok and not done.timed_out and not done.truncated
    assert patient("print(6 * 7)").stdout == "42\n"


@pytest.mark.parametrize(
    ("code", "returncode", "said"),
    [
        ("1/0", 1, "ZeroDivisionError"),
        ("\0", 1, "SyntaxError"),
        ("'\ud800'", 1, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.abort()", -6, ""),
    ],
)
def test_how_a_program_fails(code: str, returncode: int, said: str) -> None:
    done = patient(code)
    assert not done.ok and done.returncode == returncode and said in done.stderr


@linux_alone
def test_memory_has_an_end() -> None:
    done = patient("x = bytearray(1 << 30)", memory_mb=64)
    assert done.returncode == 1 and "MemoryError" in done.stderr
    assert patient("x = bytearray(32 << 20)", memory_mb=64).ok


@pytest.mark.usefixtures("either")
def test_output_has_an_end_and_the_program_is_not_held_up_by_it() -> None:
    code = "import sys\nfor n in range(300): sys.stdout.write('x' * 10000)\nsys.exit(4)"
    done = patient(code, max_output=1000)
    assert done.truncated and done.stdout == "x" * 1000 and done.returncode == 4


def test_input_that_nobody_reads_holds_up_nobody() -> None:
    assert patient("print(1)", stdin="x" * 5_000_000).ok
    assert patient("import sys; print(len(sys.stdin.read()))", stdin=b"x" * 3_000_000).stdout == (
        "3000000\n"
    )


ENDLESS = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
if os.fork() == 0:
    {leave}
    os.fork()
    time.sleep(600)
print("begun", flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["while True: pass", "sys.exit(0)"])
def test_nobody_outlives_a_program(then: str) -> None:
    name = f"endless-{secrets.token_hex(3)}"
    leave = "os.setsid()" if on_linux() else "pass"
    code = ENDLESS.format(name=name, leave=leave, then=then)
    endless = then.startswith("while")
    done = patient(code, **({"timeout_s": 3.0} if endless else {}))
    assert done.timed_out == endless and done.ok != endless
    if on_linux():
        assert eventually(lambda: not named(name))


@linux_alone
def test_whoever_is_interrupted_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"left-{secrets.token_hex(3)}"
    code = ENDLESS.format(name=name, leave="os.setsid()", then="while True: pass")

    def interrupt(*_: object) -> None:
        assert eventually(lambda: len(named(name)) >= 2)
        raise KeyboardInterrupt

    monkeypatch.setattr("dora_rl.sandbox.programs.python._Supervisor._await_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        patient(code)
    assert eventually(lambda: not named(name))


def test_the_scratch_directory_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert patient("open('note', 'w').write('x')").ok
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout_s": 0}, "timeout_s must be > 0: `0`"),
        ({"timeout_s": math.nan}, "timeout_s must be > 0: `nan`"),
        ({"memory_mb": 1}, "memory_mb must be >= 16: `1`"),
    ],
)
def test_bad_limits_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(SandboxError, match=said):
        run_python("print(1)", **settings)  # type: ignore[arg-type]


def test_a_program_that_cannot_be_started_is_no_failure_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is gone by the time that it is to become the program."""
    gone = tmp_path / "python"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(gone)!r}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxError, match="No such file"):
        patient("print(1)")


@pytest.mark.parametrize("named", ["", ".", "{here}", "{link}"])
def test_nothing_is_imported_from_the_working_directory(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker anybody may have written there, and the supervisor is outside the sandbox."""
    here, link, planted = tmp_path / "here", tmp_path / "link", tmp_path / "planted"
    (here / "dora_rl").mkdir(parents=True)
    link.symlink_to(here)
    for module in ("sitecustomize.py", "usercustomize.py", "msgspec.py", "dora_rl/__init__.py"):
        (here / module).write_text(f"open({str(planted)!r}, 'a').write({module!r})\n")
    monkeypatch.chdir(here)
    path = named.format(here=here, link=link)
    monkeypatch.setattr(sys, "path", [path, *sys.path])
    monkeypatch.setenv("PYTHONPATH", path + os.pathsep)
    assert patient("print(1)").stdout == "1\n"
    assert not planted.exists(), planted.read_text()


# What it does not get


def victim(directory: Path) -> str:
    """The dataset with its answers, say."""
    path = directory / "answers.jsonl"
    path.write_text("42")
    path.chmod(0o666)
    return str(path)


@linux_alone
def test_a_program_gets_nothing_of_its_caller(tmp_path: Path) -> None:
    words, gaps = attempts.attempted([victim(tmp_path)])
    if gaps:
        skip_weaker(f"this system gives less: {gaps}")
    assert words == attempts.ALLOWED


@linux_alone
def test_a_program_below_a_worker_gets_nothing_of_the_reward(tmp_path: Path) -> None:
    part = UserFunction(name="a", function="tests.sandbox.attempts:reward")
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S) as pool:
        example = {"files": [victim(tmp_path)]}
        outcome = pool.run(ScoreJob(response="", example=example))
        apart = pool.isolation.processes == "apart"
    assert outcome.failure is None, outcome
    if not apart:
        skip_weaker("no namespaces here")
    assert outcome.parts == {"a.done": 1.0, "a.gaps": 0.0}


ORDINARY = """
    import os
    from pathlib import Path
    from dora_rl.tasks.scores import ScoreJob, ScorePool
    from dora_rl.sandbox.protocol import UserFunction
    from tests.sandbox import attempts
    from tests.sandbox.test_run_python import victim
    if __name__ == "__main__":
        files = [victim(Path.cwd())]
        print(os.geteuid(), *attempts.attempted(files))
        part = UserFunction(name="a", function="tests.sandbox.attempts:reward")
        with ScorePool([part], workers=1, timeout_s=120) as pool:
            print(pool.run(ScoreJob(response="", example={"files": files})).parts)
"""


@linux_alone
def test_nor_does_it_get_anything_of_an_ordinary_user(tmp_path: Path) -> None:
    done = run_as_ordinary_user(ORDINARY, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    if not first.endswith(" ()"):
        skip_weaker(f"this system gives less: {first}")
    assert not first.startswith("0 ") and first.endswith("{'done'} ()"), first
    assert second == "{'a.done': 1.0, 'a.gaps': 0.0}"


@pytest.mark.parametrize(
    ("value", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_system_that_gives_less_fails_where_all_is_expected(
    value: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPECTED, value)
    with pytest.raises((pytest.skip.Exception, pytest.fail.Exception)) as ended:
        skip_weaker("no namespaces here")
    assert ended.type is outcome


def test_what_the_portable_way_cannot_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    told = patient("print(1)").gaps
    for what in ("network", "memory", "other processes", "to read and to write", "outlive"):
        assert any(what in gap for gap in told), (what, told)


def test_a_coding_reward_scores_a_program() -> None:
    part = UserFunction(name="a", function="tests.sandbox.attempts:plain")
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S) as pool:
        assert pool.run(ScoreJob(response="print(6 * 7)")).reward == 1.0
        assert pool.run(ScoreJob(response="import os; os._exit(0)")).reward == 0.0
        assert pool.run(ScoreJob(response="print(40")).reward == 0.0


def test_libraries_of_this_interpreter_can_be_imported() -> None:
    done = patient("import msgspec, sys; print(sys.version_info[:2])")
    assert done.ok, done.stderr
    assert done.stdout == f"{sys.version_info[:2]}\n"
