"""The supervisor's policy for the trainer, without a process: when it is replaced, when not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import TRAINER, FailRun, RejectBatch, Restart, RunFacts
from dora_rl.runtime.control.supervisor import MOST_RESTARTS
from tests.runtime.test_supervisor import KILLED, LIMITS, RUN, TRAINING, ready, supervisor


def test_a_batch_that_kills_its_trainers_is_rejected() -> None:
    sup = supervisor()
    for incarnation in range(LIMITS.max_train_attempts):
        ready(sup, incarnation=incarnation)
        found = sup.died(0.0, TRAINER, KILLED, TRAINING)
        assert found == [Restart(TRAINER, incarnation + 1, KILLED.why)]
        sup.started(0.0, TRAINER, incarnation)
        died = sup.died(0.0, TRAINER, KILLED, TRAINING)  # before it has seen the batch
        assert isinstance(died[0], Restart)
    ready(sup, incarnation=5)
    assert sup.died(0.0, TRAINER, KILLED, TRAINING) == [RejectBatch(KILLED.why)]
    assert sup.batch_rejected(failed=False) == [Restart(TRAINER, 6, KILLED.why)]
    ready(sup, incarnation=6)  # and the count starts anew
    assert sup.died(0.0, TRAINER, KILLED, TRAINING) == [Restart(TRAINER, 7, KILLED.why)]


def test_no_trainer_is_started_for_a_run_that_the_rejection_has_failed() -> None:
    sup = supervisor(max_train_attempts=0)
    ready(sup)
    sup.asked(0.0, ms.TrainOn(3, (), ()))
    assert sup.died(0.0, TRAINER, KILLED, TRAINING) == [RejectBatch(KILLED.why)]
    assert sup.batch_rejected(failed=True) == []
    assert sup.check(1e9, RUN) == [], "it is dead already"


def test_a_trainer_that_dies_before_the_last_checkpoint_is_complete_is_replaced() -> None:
    sup = supervisor()
    ready(sup)
    halted = RunFacts(steps=4, halted=True, stopping=True)
    assert sup.died(0.0, TRAINER, KILLED, halted) == [Restart(TRAINER, 1, KILLED.why)]


@pytest.mark.parametrize("durable", [True, False])
def test_nobody_misses_a_trainer_that_dies_after_the_last_checkpoint(durable: bool) -> None:
    """An evaluation may still be under way. It is not killed over and over, either."""
    sup = supervisor(redoes_steps=durable)
    ready(sup)
    sup.asked(0.0, ms.PublishVersion(4))
    saved = RunFacts(steps=4, halted=True, stopping=True, saved=True)
    assert sup.died(0.0, TRAINER, KILLED, saved) == []
    assert sup.check(1e9, saved) == []
    assert not sup.trainer_awaited


def test_a_trainer_that_dies_while_it_takes_steps_again_has_not_seen_the_batch() -> None:
    sup = supervisor(max_train_attempts=0)
    for incarnation in range(MOST_RESTARTS):
        ready(sup, incarnation=incarnation)
        sup.asked(0.0, ms.Redo(0, (), ()))
        sup.asked(0.0, ms.Redo(1, (), ()))
        sup.heard(0.0, TRAINER, ms.Redone(0))
        found = sup.died(0.0, TRAINER, KILLED, TRAINING)
        assert found == [Restart(TRAINER, incarnation + 1, KILLED.why)]
    ready(sup, incarnation=MOST_RESTARTS)
    sup.asked(0.0, ms.Redo(1, (), ()))
    last = sup.died(0.0, TRAINER, KILLED, TRAINING)
    assert last == [FailRun(f"{KILLED.why}, 4 times")], "it gets no further"


def test_a_trainer_that_has_taken_its_steps_again_has_seen_the_batch() -> None:
    sup = supervisor(max_train_attempts=0)
    ready(sup)
    sup.asked(0.0, ms.Redo(0, (), ()))
    sup.heard(0.0, TRAINER, ms.Redone(0))
    assert sup.died(0.0, TRAINER, KILLED, TRAINING) == [RejectBatch(KILLED.why)]


def test_trainers_that_die_without_a_batch_fail_the_run() -> None:
    sup = supervisor()
    for incarnation in range(3):
        ready(sup, incarnation=incarnation)
        found = sup.died(0.0, TRAINER, KILLED, RUN)
    assert found == [FailRun(f"{KILLED.why}, 3 times")]


@given(st.lists(st.booleans(), max_size=30))
def test_a_step_that_is_taken_clears_the_batch_of_blame(taken: list[bool]) -> None:
    sup = supervisor()
    deaths = 0
    for incarnation, step_is_taken in enumerate(taken):
        ready(sup, incarnation=incarnation)
        if step_is_taken:
            sup.heard(0.0, TRAINER, ms.Rejected(0, (), "too large", ()))
            deaths = 0
        deaths += 1
        found = sup.died(0.0, TRAINER, KILLED, TRAINING)
        if deaths > LIMITS.max_train_attempts:
            assert found == [RejectBatch(KILLED.why)]
            sup.batch_rejected(failed=False)
            deaths = 0
        else:
            assert found == [Restart(TRAINER, incarnation + 1, KILLED.why)]


def test_without_a_ledger_a_trainer_that_has_trained_is_not_replaced() -> None:
    sup = supervisor(redoes_steps=False)
    ready(sup)
    assert isinstance(sup.died(0.0, TRAINER, KILLED, RunFacts(steps=0))[0], Restart)
    ready(sup)
    failed = FailRun(f"{KILLED.why}. See run/logs/trainer.log.")
    assert sup.died(0.0, TRAINER, KILLED, RunFacts(steps=1)) == [failed]


def test_a_step_that_cannot_be_taken_again_fails_the_run() -> None:
    sup = supervisor()
    ready(sup)
    found = sup.heard(0.0, TRAINER, ms.Redone(4, "the digest differs"))
    assert found == [FailRun("step 5 could not be taken again: the digest differs")]
    assert sup.heard(0.0, TRAINER, ms.Redone(4)) == ()
