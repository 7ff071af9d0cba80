"""The audit: a clean stream is clean, and every breach of C1, C3 and trained-once is caught."""

import pytest

from dora_rl.core.audit import Promise, Spread
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.core.protocol.types import BatchGroup, Segment
from tests.core.story import opened

# Clean


def test_a_whole_run_is_clean() -> None:
    story = opened(max_steps=2)
    for step in range(2):
        story.ready(step)
        story.train(step, step)
        story.trained(step)
    story.ask(c.Install(0, 0, 2, evict=0))
    story.see(e.VersionInstalled(0, 0, 2, "d2"), c.Delete(0), c.Delete(1))
    story.ask(c.Halt(True, "2 steps trained"))
    report = story.report
    assert story.broken == set()
    assert report.ok and report.verdict == "clean" and report.notes == ()
    assert (report.issued, report.trained, report.outstanding, report.lost) == (4, 4, 0, 0)
    assert (report.steps, report.finished, report.mixed) == (2, 4, 0)
    assert report.staleness == Spread(0.5, 1, 1)
    assert report.lengths.trained == Spread(11.5, 13, 13)
    assert report.halted == "done: 2 steps trained"
    assert report.summary()[0].startswith("multi_version: clean (")


def test_what_is_under_way_is_outstanding() -> None:
    story = opened()
    story.start(0)
    report = story.report
    assert (report.issued, report.outstanding) == (2, 2)


def test_filtered_groups_are_counted() -> None:
    story = opened()
    story.ready(0)
    story.start(2)
    story.finish(2)
    story.start(3)
    story.finish(3)
    story.ask(c.Judge(1, (2, 3)))
    story.see(e.GroupJudged(1, "all equal"))
    story.see(e.GroupJudged(1, "all equal"))  # a duplicate
    report = story.report
    assert report.ok
    assert (report.issued, report.filtered, report.outstanding) == (4, 2, 2)


def test_repeats_duplicates_and_zombies_that_are_absorbed_are_clean() -> None:
    story = opened()
    fence = story.start(0)
    story.ask(c.Start(0, fence, 0, 0))
    story.finish(0)
    story.see(e.TrajectoryFinished(0, fence, 10, (Segment(0, "d0", 10),)))
    story.see(e.TrajectoryFailed(0, fence, "late"))
    story.see(e.TrajectoryFinished(1, 99, 10, (Segment(7, "?", 10),)))
    story.see(e.TrajectoryFinished(900, 99, 10, (Segment(7, "?", 10),)))
    story.start(1)
    story.finish(1)
    story.ask(c.Judge(0, (0, 1)))
    story.ask(c.Judge(0, (0, 1)))
    story.see(e.GroupJudged(0))
    story.train(0, 0)
    story.train(0, 0)
    story.see(e.BatchTrained(0), c.Publish(1))
    story.see(e.BatchTrained(0))
    story.ask(c.Publish(1))
    assert story.broken == set()
    assert (story.report.steps, story.report.trained) == (1, 2)


def test_a_score_asked_for_again_gets_a_new_fence() -> None:
    story = opened()
    story.start(0)
    story.finish(0, scored=False)
    story.see(e.TrajectoryFailed(0, 1, "judge crashed"), c.Score(0, 50))
    story.see(e.TrajectoryScored(0, 50))
    story.start(1)
    story.finish(1)
    story.ask(c.Judge(0, (0, 1)))
    assert story.broken == set()


def test_a_failed_batch_may_be_sent_again() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.see(e.BatchFailed(0, "out of memory"))
    story.see(e.BatchFailed(0, "out of memory"))
    story.train(0, 0)
    story.trained(0)
    assert story.broken == set()
    assert story.report.trained == 2


def test_members_of_a_rejected_batch_may_fail_and_no_others() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.see(e.BatchRejected(0, (5,), "loss is nan"))
    story.see(e.BatchRejected(0, (0,), "loss is nan"))
    story.ask(c.Fail(0, "loss is nan"))
    story.ask(c.Fail(1, "loss is nan"))
    assert story.broken == set()
    assert (story.report.trained, story.report.failed) == (0, 2)
    story.ready(1)
    story.train(0, 1)
    story.see(e.BatchRejected(0, (0,), "loss is nan"))  # a late copy
    story.ask(c.Fail(2, "loss is nan"))
    assert story.broken != set()


def test_refused_events_are_counted_and_change_nothing() -> None:
    story = opened()
    story.audit.observe_refused(9.0, e.BatchTrained(0))
    assert (story.report.refused, story.report.steps, story.report.ok) == (1, 0, True)


def test_nothing_counts_after_the_halt() -> None:
    story = opened()
    story.ask(c.Halt(False, "no instance"))
    story.start(0, version=9)
    assert story.broken == set()
    assert story.report.halted == "failed: no instance"
    assert story.report.issued == 0


# C1


def test_a_mixed_trajectory_breaks_c1() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.start(2)
    story.finish(2, (0, 4), (1, 6))
    assert story.broken == {Promise.ONE_VERSION}
    assert "trajectory 2 was sampled by versions 0, 1" in story.example(Promise.ONE_VERSION)
    assert not story.report.ok and story.report.verdict == "broken"


def test_segments_of_one_version_are_not_mixed() -> None:
    story = opened()
    story.start(0)
    story.finish(0, (0, 4), (0, 6))
    assert story.broken == set()


def test_another_version_than_its_groups_breaks_c1() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.host(1, version=1)
    story.start(2, version=0)
    story.start(3, version=1, instance=1)
    assert story.broken == {Promise.ONE_VERSION}
    story.finish(3, (1, 10))
    (check, *_) = story.report.checks
    assert check.breaches == 2


def test_a_wrong_digest_is_caught_when_it_is_accepted() -> None:
    story = opened()
    fence = story.start(0)
    event = e.TrajectoryFinished(0, fence, 10, (Segment(0, "other", 10),))
    story.see(event, c.Score(0, fence))
    assert story.broken == {Promise.STAMPS}


def test_a_wrong_digest_that_the_core_rejects_is_no_breach() -> None:
    story = opened()
    story.host(1)
    fence = story.start(0)
    event = e.TrajectoryFinished(0, fence, 10, (Segment(0, "other", 10),))
    story.see(event, c.Expel(0, 0, "wrong weights"))
    story.start(0, instance=1)
    story.finish(0)
    assert story.broken == set()
    assert story.report.finished == 1


def test_instances_with_wrong_weights_may_be_the_end_of_a_trajectory() -> None:
    story = opened(max_losses=0)
    fence = story.start(0)
    event = e.TrajectoryFinished(0, fence, 10, (Segment(0, "other", 10),))
    story.see(event, c.Expel(0, 0, "wrong weights"), c.Fail(0, "poison"))
    assert story.broken == set()


@pytest.mark.parametrize("segments", [(), (Segment(0, "d0", 9),)])
def test_segments_that_do_not_add_up_are_caught(segments: tuple[Segment, ...]) -> None:
    story = opened()
    fence = story.start(0)
    story.see(e.TrajectoryFinished(0, fence, 10, segments), c.Score(0, fence))
    assert story.broken == {Promise.STAMPS}


def test_a_batch_stamped_with_another_version_breaks_c1() -> None:
    story = opened(max_staleness=3)
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.ready(1)
    story.train(1, 1, version=1)
    assert story.broken == {Promise.ONE_VERSION}


@pytest.mark.parametrize("paradigm", [ParadigmName.PARTIAL, ParadigmName.IN_FLIGHT])
def test_mixed_trajectories_are_the_nature_of_some_paradigms(paradigm: ParadigmName) -> None:
    story = opened(paradigm=paradigm)
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    for member in (2, 3):
        story.start(member)
    story.ask(c.Install(0, 0, 1, evict=0, carry=True))
    story.see(e.VersionInstalled(0, 0, 1, "d1"), c.Delete(0))
    story.finish(2, (0, 4), (1, 6))
    story.finish(3, (1, 6))
    story.ask(c.Judge(1, (2, 3)))
    story.see(e.GroupJudged(1))
    story.train(1, 1)
    story.trained(1)
    report = story.report
    assert report.ok and report.verdict == "clean"
    assert (report.mixed, report.mixed_trained, report.trained) == (1, 1, 4)
    assert report.notes == (
        "C1: 1 of 4 trained trajectories are mixed; "
        f"`{paradigm}` does not promise one version each",
    )
    assert any("as designed (1)" in line for line in report.summary())


# C3


def test_a_group_older_than_k_breaks_c3() -> None:
    story = opened(paradigm=ParadigmName.SYNC)
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.ready(1)
    story.train(1, 1)
    assert "group 1 is of version 0, K = 0" in story.example(Promise.STALENESS)


def test_a_group_overtaken_at_its_deadline_breaks_c3() -> None:
    story = opened(max_staleness=0)
    story.start(2)
    story.ready(0)
    story.train(0, 0)
    assert "overtakes group 1 of version 0" in story.example(Promise.STALENESS)


def test_unbounded_staleness_is_the_nature_of_some_paradigms() -> None:
    story = opened(paradigm=ParadigmName.PARTIAL, max_staleness=0)
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.ready(1)
    story.train(1, 1)
    story.trained(1)
    report = story.report
    assert report.ok
    assert report.notes == ("C3: staleness reaches 1 with K = 0; `partial` does not bound it",)


def test_the_oldest_segment_decides_the_staleness() -> None:
    story = opened(paradigm=ParadigmName.IN_FLIGHT, max_staleness=1)
    for step in range(2):
        story.ready(step)
        story.train(step, step)
        story.trained(step)
    story.host(1, version=2)
    for member in (4, 5):
        story.start(member, version=2, instance=1)
    story.finish(4, (0, 1), (2, 9))
    story.finish(5, (2, 9))
    story.ask(c.Judge(2, (4, 5)))
    story.see(e.GroupJudged(2))
    story.train(2, 2)
    story.trained(2)
    assert "group 2 is of version 0" in story.example(Promise.STALENESS)
    assert story.report.staleness.max == 2


# Trained once


def test_a_group_trained_twice_is_caught() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.train(1, 0)
    assert "group 0 has been trained already" in story.example(Promise.TRAINED_ONCE)


def test_a_group_twice_in_a_batch_is_caught() -> None:
    story = opened()
    story.ready(0)
    entry = BatchGroup(0, 0, (0, 1))
    story.ask(c.Train(0, (entry, entry)))
    assert "in the batch twice" in story.example(Promise.TRAINED_ONCE)


def test_a_stranger_or_a_double_in_a_group_is_caught() -> None:
    for listed in ((0, 1, 1), (0, 1, 2)):
        story = opened()
        for member in (0, 1, 2):
            story.start(member)
            story.finish(member)
        story.ask(c.Judge(0, listed))
        assert story.broken == {Promise.TRAINED_ONCE}


def test_a_step_out_of_order_is_caught() -> None:
    story = opened()
    story.ready(0)
    story.train(1, 0)
    assert "Train of step 1 after 0 steps" in story.example(Promise.TRAINED_ONCE)


def test_a_step_sent_again_with_other_groups_is_caught() -> None:
    story = opened()
    story.ready(0)
    story.ready(1)
    story.train(0, 0)
    story.train(0, 1)
    assert "again with other groups" in story.example(Promise.TRAINED_ONCE)


def test_a_publication_without_its_step_is_caught() -> None:
    story = opened()
    story.ask(c.Publish(1))
    assert "Publish of version 1 after 0 train steps" in story.example(Promise.TRAINED_ONCE)
