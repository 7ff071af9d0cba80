"""Code that a reward runs cannot answer for it: as root, as an ordinary user, and portably."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_rl.machine.fast_paths import PORTABLE, on_linux
from dora_rl.sandbox.protocol import KEY_BYTES, Answer, UserFunction
from dora_rl.tasks.scores import ScoreJob, ScorePool
from tests.ordinary_user import run_as_ordinary_user
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away")

PROGRAM = """
    import os
    from dora_rl.tasks.scores import ScoreJob, ScorePool
    from dora_rl.sandbox.protocol import UserFunction
    from tests.tasks import forgery
    {patch}
    part = UserFunction(name="act", function={function})
    with ScorePool([part], workers=1, timeout_s={patience}) as pool:
        print(os.geteuid(), pool.isolation.processes, pool.run(ScoreJob(response="")))
"""
# On a system that gives no namespaces: a fork has the patch as well.
NO_NAMESPACES = "from dora_rl.sandbox import linux; linux.unshare = lambda what: False"
WAYS = {
    "namespaces": ("", '"tests.tasks.forgery:{name}"'),
    "no namespaces": (NO_NAMESPACES, "lambda response: forgery.{name}(response)"),
}


def program(way: str, name: str) -> str:
    patch, function = WAYS[way]
    return PROGRAM.format(patch=patch, function=function.format(name=name), patience=PATIENCE_S)


def test_code_that_a_reward_runs_does_not_answer_for_it() -> None:
    part = UserFunction(name="act", function="tests.tasks.forgery:steal")
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S) as pool:
        outcome = pool.run(ScoreJob(response=""))
    assert outcome.reward != outcome.reward, outcome
    assert "the code failed its tests" in str(outcome.failure)


@pytest.mark.parametrize("way", WAYS)
def test_nor_does_it_as_an_ordinary_user(way: str, tmp_path: Path) -> None:
    done = run_as_ordinary_user(program(way, "steal"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("0 ") and "reward=nan" in done.stdout, done.stdout
    assert "the code failed its tests" in done.stdout


def test_where_the_channel_can_be_taken_an_answer_without_the_seal_is_refused(
    tmp_path: Path,
) -> None:
    done = run_as_ordinary_user(program("namespaces", "steal"), tmp_path, **{PORTABLE: "1"})
    assert done.returncode == 0, done.stderr
    assert "reward=nan" in done.stdout and "did not seal" in done.stdout, done.stdout


def test_code_that_a_reward_runs_cannot_reach_into_its_worker() -> None:
    part = UserFunction(name="act", function="tests.tasks.forgery:reach")
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S) as pool:
        outcome = pool.run(ScoreJob(response=""))
    assert outcome.failure is None and outcome.parts == {"act.ways": 0.0}, outcome


@pytest.mark.parametrize("way", WAYS)
def test_nor_can_it_as_an_ordinary_user(way: str, tmp_path: Path) -> None:
    done = run_as_ordinary_user(program(way, "reach"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failure=None" in done.stdout and "reward=0.0" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "altered", [{"number": 2}, {"content": b"{}"}, {"seconds": 1.0}, {"spent": True}, {"seal": b""}]
)
def test_a_seal_is_of_the_whole_answer(altered: dict[str, Any]) -> None:
    key, other = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
    answer = Answer(1, b'{"reward":1.0}', 0.5, False).sealed(key)
    assert answer.sealed_with(key) and not answer.sealed_with(other)
    assert not msgspec.structs.replace(answer, **altered).sealed_with(key)
