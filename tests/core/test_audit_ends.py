"""The audit of C2: every issued trajectory ends once, and fails only for a cause."""

from typing import Any

import pytest

from dora_rl.core.audit import Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.settings import OnFailedMember
from dora_rl.core.protocol.types import BatchGroup, Length
from tests.core.story import Story, opened

# Failures with a cause


def scored(story: Story, *members: int) -> None:
    for member in members:
        story.start(member)
        story.finish(member)


def broken_off(story: Story, trajectory: int, *commands: c.Command) -> None:
    """One attempt that fails."""
    fence = story.start(trajectory)
    story.see(e.TrajectoryFailed(trajectory, fence, "boom"), c.Cancel(trajectory, fence, 0))
    story.ask(*commands)


def fails(story: Story, trajectory: int, reason: str = "boom") -> None:
    story.ask(c.Fail(trajectory, reason))


def test_a_member_that_fails_leaves_its_group() -> None:
    story = opened(max_retries=1)
    scored(story, 0)
    broken_off(story, 1)
    broken_off(story, 1, c.Fail(1, "boom"), c.Judge(0, (0,)))
    story.see(e.GroupJudged(0))
    report = story.report
    assert (report.issued, report.failed, report.outstanding) == (2, 1, 1)
    story.ask(c.Train(0, (BatchGroup(0, 0, (0,)),)))
    story.trained(0)
    story.ask(c.Halt(True, "done"))
    report = story.report
    assert story.broken == set()
    assert (report.trained, report.failed, report.outstanding, report.lost) == (1, 1, 0, 0)
    assert report.failed_for == {"boom": 1}
    assert "  failed for: boom 1" in report.summary()


def test_a_group_whose_members_all_failed_is_over() -> None:
    story = opened(max_retries=0)
    broken_off(story, 0, c.Fail(0, "boom"))
    broken_off(story, 1, c.Fail(1, "bang"))
    report = story.report
    assert (report.failed, report.outstanding) == (2, 0)
    assert report.failed_for == {"boom": 1, "bang": 1}
    story.see(e.InstanceFailed(0, 0, "crash"))
    story.ask(c.Halt(True, "done"))
    assert story.broken == set()


def test_filtered_members_are_counted_by_reason_without_the_failed() -> None:
    story = opened(max_retries=0)
    scored(story, 0)
    broken_off(story, 1, c.Fail(1, "boom"), c.Judge(0, (0,)))
    story.see(e.GroupJudged(0, "all equal"))
    report = story.report
    assert report.ok
    assert (report.filtered, report.failed, report.outstanding) == (1, 1, 0)
    assert report.filtered_for == {"all equal": 1}
    assert "  filtered for: all equal 1" in report.summary()


def test_a_placement_that_stands_still_for_too_long_is_a_cause() -> None:
    story = opened(max_retries=0, trajectory_timeout_s=10.0)
    scored(story, 0)
    fence = story.start(1)
    story.now += 10.0
    story.see(e.InstanceProgressed(0, 0, 5, ()), c.Cancel(1, fence, 0), c.Fail(1, "timeout"))
    assert story.broken == set()


@pytest.mark.parametrize("waited_s", [0.0, 10.0])
def test_a_placement_that_goes_on_is_not_failed_for_time(waited_s: float) -> None:
    story = opened(max_retries=0, trajectory_timeout_s=10.0)
    scored(story, 0)
    fence = story.start(1)
    story.now += waited_s
    if waited_s:
        story.see(e.InstanceProgressed(0, 0, 5, (Length(1, fence, 4),)))
    story.ask(c.Cancel(1, fence, 0), c.Fail(1, "timeout"))
    assert "trajectory 1 failed without a cause" in story.example(Promise.NOTHING_LOST)


@pytest.mark.parametrize("report", [(1, 99), (0, 1)])
def test_progress_of_another_does_not_count(report: tuple[int, int]) -> None:
    story = opened(max_retries=0, trajectory_timeout_s=10.0)
    fence = story.start(1)
    story.now += 10.0
    story.see(e.InstanceProgressed(0, 0, 5, (Length(*report, 4),)))
    story.see(e.InstanceProgressed(0, 7, 5, (Length(1, fence, 4),)))  # another incarnation
    story.ask(c.Cancel(1, fence, 0), c.Fail(1, "timeout"))
    assert story.broken == set()


def test_instances_that_die_under_a_trajectory_are_a_cause() -> None:
    story = opened(max_losses=1)
    scored(story, 0)
    for incarnation in (1, 2):
        story.start(1)
        story.see(e.InstanceFailed(0, incarnation - 1, "crash"))
        story.host(0, incarnation=incarnation)
    fails(story, 1, "poison")
    story.ask(c.Judge(0, (0,)))
    assert story.broken == set()


def test_scores_that_fail_or_never_come_are_a_cause() -> None:
    story = opened(max_retries=1, score_timeout_s=10.0)
    story.start(0)
    story.finish(0, scored=False)
    story.now += 10.0
    story.see(e.TrajectoryFailed(0, 1, "judge crashed"), c.Score(0, 50))  # late: that is one
    story.now += 10.0
    story.ask(c.Fail(0, "score timeout"))
    assert story.broken == set()


def test_one_late_failure_of_a_score_is_one() -> None:
    story = opened(max_retries=1, score_timeout_s=10.0)
    story.start(0)
    story.finish(0, scored=False)
    story.now += 10.0
    story.see(e.TrajectoryFailed(0, 1, "judge crashed"), c.Score(0, 50))
    fails(story, 0)
    assert story.broken == {Promise.NOTHING_LOST}


def test_a_refusal_is_a_cause_by_itself() -> None:
    story = opened(max_retries=3)
    fence = story.start(0)
    story.see(e.TrajectoryRefused(0, fence, "too long"), c.Cancel(0, fence, 0))
    fails(story, 0)
    assert story.broken == set()


def test_a_refusal_of_an_older_placement_is_none() -> None:
    story = opened(max_retries=3)
    fence = story.start(0)
    story.see(e.TrajectoryRefused(0, fence + 100, "too long"))
    fails(story, 0)
    assert story.broken == {Promise.NOTHING_LOST}


def test_a_group_fails_with_its_member_where_the_settings_say_so() -> None:
    story = opened(group_size=3, max_retries=0, on_failed_member=OnFailedMember.FAIL_GROUP)
    fence = story.start(0)
    story.start(1)
    rest = (c.Cancel(1, 2, 0), c.Fail(1, "sibling failed"), c.Fail(2, "sibling failed"))
    story.see(e.TrajectoryFailed(0, fence, "boom"), c.Fail(0, "boom"), *rest)
    report = story.report
    assert (report.issued, report.failed, report.outstanding) == (3, 3, 0)
    assert report.failed_for == {"boom": 1, "sibling failed": 2}
    story.ask(c.Halt(True, "done"))
    assert story.broken == set()


def test_a_judgement_that_never_comes_is_a_cause() -> None:
    story = opened(max_retries=0, score_timeout_s=5.0)
    scored(story, 0, 1)
    story.ask(c.Judge(0, (0, 1)))
    story.now += 5.0
    story.ask(c.Fail(0, "judge timeout"), c.Fail(1, "judge timeout"))
    story.see(e.GroupJudged(0))  # too late
    story.ask(c.Halt(True, "done"))
    assert story.broken == set()
    assert story.report.failed == 2


def test_a_late_judgement_counts_until_it_is_given_up() -> None:
    story = opened(max_retries=0, score_timeout_s=5.0)
    scored(story, 0, 1)
    story.ask(c.Judge(0, (0, 1)))
    story.now += 10.0
    story.see(e.GroupJudged(0))
    story.train(0, 0)
    story.trained(0)
    assert story.broken == set()
    assert story.report.trained == 2


# Failures without one


@pytest.mark.parametrize("on_failed", OnFailedMember)
@pytest.mark.parametrize("stage", ["unknown", "waiting", "running", "scoring", "scored"])
def test_a_failure_without_a_cause_is_caught(stage: str, on_failed: OnFailedMember) -> None:
    story = opened(on_failed_member=on_failed)
    if stage == "waiting":
        story.start(1)
    elif stage != "unknown":
        story.start(0)
    if stage in ("scoring", "scored"):
        story.finish(0, scored=stage == "scored")
    fails(story, 0, "too old")
    example = story.example(Promise.NOTHING_LOST)
    assert "trajectory 0 failed without a cause: `too old`" in example
    report = story.report
    assert (report.issued, report.failed, report.outstanding) == (2, 1, 1)


def test_one_failure_too_few_is_no_cause() -> None:
    story = opened(max_retries=1)
    scored(story, 0)
    broken_off(story, 1, c.Fail(1, "boom"))
    assert story.broken == {Promise.NOTHING_LOST}


def test_one_loss_too_few_is_no_cause() -> None:
    story = opened(max_losses=1)
    story.start(1)
    story.see(e.InstanceFailed(0, 0, "crash"), c.Fail(1, "poison"))
    assert story.broken == {Promise.NOTHING_LOST}


def test_a_failed_sibling_is_no_cause_where_the_rest_is_trained() -> None:
    story = opened(max_retries=0)
    story.start(1)
    broken_off(story, 0, c.Fail(0, "boom"), c.Cancel(1, 1, 0), c.Fail(1, "sibling failed"))
    assert "trajectory 1 failed without a cause" in story.example(Promise.NOTHING_LOST)


def test_a_judgement_not_waited_for_is_no_cause() -> None:
    for wait_s, retries in ((0.0, 0), (9.0, 1)):
        story = opened(max_retries=retries, score_timeout_s=5.0)
        scored(story, 0, 1)
        story.ask(c.Judge(0, (0, 1)))
        story.now += wait_s
        fails(story, 0, "judge timeout")
        assert story.broken == {Promise.NOTHING_LOST}


@pytest.mark.parametrize("stage", ["ready", "training"])
def test_what_was_judged_does_not_fail(stage: str) -> None:
    story = opened(max_retries=0)
    broken_off(story, 0)
    story.ready(0)
    if stage == "training":
        story.train(0, 0)
    fails(story, 0)
    assert "trajectory 0 failed without a cause" in story.example(Promise.NOTHING_LOST)
    fails(story, 1)
    story.see(e.BatchTrained(0))
    report = story.report
    assert (report.trained, report.failed, report.outstanding) == (0, 2, 0)


# Ended once


def failed_once() -> Story:
    """Trajectory 1 of group 0 has failed, trajectory 0 is scored."""
    story = opened(max_retries=0)
    scored(story, 0)
    broken_off(story, 1, c.Fail(1, "boom"))
    assert story.broken == set()
    return story


def test_a_second_failure_is_caught() -> None:
    story = failed_once()
    fails(story, 1)
    assert "Fail of trajectory 1, which is over" in story.example(Promise.NOTHING_LOST)
    assert story.report.failed == 1


@pytest.mark.parametrize("end", ["trained", "filtered", "failed"])
def test_a_failure_of_what_has_ended_is_caught(end: str) -> None:
    story = opened(max_retries=0)
    if end == "failed":
        broken_off(story, 0, c.Fail(0, "boom"))
        broken_off(story, 1, c.Fail(1, "boom"))
    else:
        scored(story, 0, 1)
        story.ask(c.Judge(0, (0, 1)))
        story.see(e.GroupJudged(0, "all equal" if end == "filtered" else None))
    if end == "trained":
        story.train(0, 0)
        story.trained(0)
    assert story.broken == set()
    fails(story, 0)
    assert "Fail of trajectory 0, which is over" in story.example(Promise.NOTHING_LOST)


@pytest.mark.parametrize("use", [c.Start(1, 90, 0, 0), c.Score(1, 2), c.Score(1, 90)])
def test_what_has_failed_is_neither_started_nor_scored(use: c.Command) -> None:
    story = failed_once()
    story.ask(use)
    assert story.broken == {Promise.FENCING}
    assert (story.report.failed, story.report.outstanding) == (1, 1)


def test_what_has_failed_is_not_judged() -> None:
    story = failed_once()
    story.ask(c.Judge(0, (0, 1)))
    example = story.example(Promise.NOTHING_LOST)
    assert "trajectory 1 continues, though it is over" in example


def test_what_has_failed_is_not_trained() -> None:
    story = failed_once()
    story.ask(c.Judge(0, (0,)))
    story.see(e.GroupJudged(0))
    story.train(0, 0)
    example = story.example(Promise.NOTHING_LOST)
    assert "trajectory 1 continues, though it is over" in example
    story.trained(0)
    assert (story.report.trained, story.report.failed, story.report.lost) == (1, 1, 0)


@pytest.mark.parametrize("use", ["judge", "train"])
def test_a_group_that_has_failed_does_not_go_on(use: str) -> None:
    story = failed_once()
    broken_off(story, 2, c.Fail(2, "boom"))
    broken_off(story, 3, c.Fail(3, "boom"))
    if use == "judge":
        story.ask(c.Judge(1, (2, 3)))
        assert "Judge of group 1: not open" in story.example(Promise.FENCING)
    else:
        story.train(0, 1)
        assert "group 1 is failed already" in story.example(Promise.NOTHING_LOST)


def test_a_filtered_group_is_not_trained() -> None:
    story = opened()
    scored(story, 0, 1)
    story.ask(c.Judge(0, (0, 1)))
    story.see(e.GroupJudged(0, "all equal"))
    story.train(0, 0)
    assert "group 0 is filtered already" in story.example(Promise.NOTHING_LOST)


# Losses


def test_a_member_that_vanishes_is_lost() -> None:
    story = opened()
    scored(story, 0, 1)
    story.ask(c.Judge(0, (0,)))
    assert "trajectory 1 is missing" in story.example(Promise.NOTHING_LOST)
    story.see(e.GroupJudged(0))
    story.ask(c.Train(0, (BatchGroup(0, 0, (0,)),)))
    story.trained(0)
    report = story.report
    assert (report.trained, report.failed, report.lost) == (1, 0, 1)
    assert "LOST 1" in report.summary()[1]


def test_a_member_never_started_is_lost() -> None:
    story = opened()
    scored(story, 0)
    story.ask(c.Judge(0, (0,)))
    assert story.broken == {Promise.NOTHING_LOST}


def test_failures_without_a_word_do_not_explain_a_missing_member() -> None:
    story = opened(max_retries=0)
    scored(story, 0)
    broken_off(story, 1, c.Judge(0, (0,)))
    assert "trajectory 1 is missing" in story.example(Promise.NOTHING_LOST)


def test_a_batch_that_leaves_a_judged_member_out_loses_it() -> None:
    story = opened()
    story.ready(0)
    story.ask(c.Train(0, (BatchGroup(0, 0, (0,)),)))
    assert story.broken == {Promise.NOTHING_LOST}
    story.trained(0)
    assert (story.report.trained, story.report.lost) == (1, 1)


@pytest.mark.parametrize("use", [c.Judge(0, ()), c.Train(0, (BatchGroup(0, 0, ()),))])
def test_a_group_without_members_is_lost(use: Any) -> None:
    story = opened()
    if isinstance(use, c.Judge):
        scored(story, 0, 1)
    else:
        story.ready(0)
    story.ask(use)
    story.see(e.GroupJudged(0))
    story.see(e.BatchTrained(0))
    assert story.broken == {Promise.NOTHING_LOST}
    assert (story.report.trained, story.report.lost, story.report.outstanding) == (0, 2, 0)


def test_a_group_left_behind_by_a_run_that_is_done_is_lost() -> None:
    story = opened()
    story.start(0)
    story.ask(c.Halt(True, "done"))
    assert "group 0 of version 0 is outstanding" in story.example(Promise.NOTHING_LOST)


def test_failures_without_a_word_do_not_close_a_group() -> None:
    story = opened(max_retries=0)
    broken_off(story, 0)
    broken_off(story, 1)
    assert story.report.outstanding == 2
    story.ask(c.Halt(True, "done"))
    assert story.broken == {Promise.NOTHING_LOST}
