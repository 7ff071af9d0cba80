"""The audit of places: leases, installs, placements, fences and migrations."""

from typing import Any

import pytest

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.audit import Promise
from dora_rl.core.types import Move, Placement, Segment
from tests.core.story import Story, migrating, opened, two_versions

# Leases and installs


def test_weights_deleted_under_outstanding_work_are_caught() -> None:
    story = two_versions()
    story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    assert "while group 1 is outstanding on it" in story.example(Promise.LEASES)


def test_weights_deleted_while_an_instance_holds_them_are_caught() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.ask(c.Install(0, 0, 1, evict=0))
    story.ask(c.Delete(0))
    assert "while instance 0 holds it" in story.example(Promise.LEASES)


@pytest.mark.parametrize("gone", ["evicted", "failed", "expelled", "dismissed", "superseded"])
def test_an_instance_that_lets_go_frees_its_version(gone: str) -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    if gone == "evicted":
        story.ask(c.Evict(0, 0, 0))
        story.see(e.VersionEvicted(0, 0, 0), c.Delete(0))
    elif gone == "failed":
        story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    elif gone == "expelled":
        story.ask(c.Expel(0, 0, "silent"), c.Delete(0))
    elif gone == "dismissed":
        story.see(e.InstanceLeaving(0, 0), c.Dismiss(0, 0), c.Delete(0))
    else:
        story.see(e.InstanceJoined(0, 1, 8, 1000), c.Delete(0))
    assert story.broken == set()


def test_a_failed_install_leaves_the_old_version_in_place() -> None:
    story = two_versions()
    story.finish(2, scored=False)
    story.ask(c.Install(0, 0, 1, evict=0))
    story.see(e.InstallFailed(0, 0, 1, "no memory"))
    story.start(3)
    assert story.broken == set()
    story.start(4, version=1)
    assert story.broken == {Promise.VERIFIED}


def test_pinned_weights_are_not_deleted() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.see(e.VersionPinned(0, "checkpoint"))
    story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    assert "while pinned by checkpoint" in story.example(Promise.LEASES)


def test_weights_may_go_once_the_pin_is_gone() -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.see(e.VersionPinned(0, "checkpoint"))
    story.see(e.VersionUnpinned(0, "checkpoint"))
    story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    assert story.broken == set()


def test_the_newest_weights_are_not_deleted() -> None:
    story = opened()
    story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    assert "the newest" in story.example(Promise.LEASES)


@pytest.mark.parametrize(
    "use", [c.Start(2, 90, 1, 0), c.Install(1, 0, 0), c.Reserve(5, 1, 0, 0, ()), c.Delete(0)]
)
def test_deleted_weights_are_not_used(use: c.Command) -> None:
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.host(1, version=1)
    story.see(e.InstanceFailed(0, 0, "crash"), c.Delete(0))
    assert story.broken == set()
    story.ask(use)
    assert Promise.LEASES in story.broken
    assert "deleted" in story.example(Promise.LEASES)


@pytest.mark.parametrize(
    "use", [c.Start(2, 90, 0, 7), c.Install(0, 0, 7), c.Reserve(5, 1, 0, 7, ()), c.Delete(7)]
)
def test_unpublished_weights_are_not_used(use: c.Command) -> None:
    story = opened()
    story.ask(use)
    assert "never published" in story.example(Promise.LEASES)


@pytest.mark.parametrize("evict", [c.Evict(0, 0, 0), c.Install(0, 0, 1, evict=0)])
def test_a_version_evicted_under_running_work_is_caught(evict: c.Command) -> None:
    story = two_versions()
    story.ask(evict)
    assert "where trajectory 2 needs it" in story.example(Promise.LEASES)


def test_parked_work_does_not_need_the_version_in_memory() -> None:
    story = two_versions()
    parked = (Placement(2, story.fences[2]),)
    story.ask(c.Park(0, 0, parked))
    story.see(e.TrajectoriesParked(0, 0, parked), c.Install(0, 0, 1, evict=0))
    story.see(e.VersionInstalled(0, 0, 1, "d1"))
    assert story.broken == set()
    story.ask(c.Unpark(0, 0, parked))
    assert "Unpark of trajectory 2" in story.example(Promise.VERIFIED)


def test_parked_work_goes_on_where_its_version_is_served() -> None:
    story = two_versions()
    parked = (Placement(2, story.fences[2]),)
    story.see(e.TrajectoriesParked(0, 0, parked), c.Unpark(0, 0, parked))
    story.finish(2)
    assert story.broken == set()


def test_a_version_evicted_under_arriving_work_is_caught() -> None:
    story = opened()
    migrating(story)
    story.ask(c.Evict(1, 0, 0))
    assert "where trajectory 0 needs it" in story.example(Promise.LEASES)


def test_no_start_before_the_install_is_verified() -> None:
    story = Story()
    story.see(e.WeightsPublished(0, "d0"))
    story.see(e.InstanceJoined(0, 0, 8, 1000), c.Install(0, 0, 0))
    story.start(0)
    assert "no verified install of version 0" in story.example(Promise.VERIFIED)


def test_no_start_after_an_install_with_the_wrong_digest() -> None:
    story = Story()
    story.see(e.WeightsPublished(0, "d0"))
    story.see(e.InstanceJoined(0, 0, 8, 1000), c.Install(0, 0, 0))
    story.see(e.VersionInstalled(0, 0, 0, "stale"))
    story.start(0)
    assert story.broken == {Promise.VERIFIED}


def test_an_installation_by_another_incarnation_does_not_count() -> None:
    story = Story()
    story.see(e.WeightsPublished(0, "d0"))
    story.see(e.InstanceJoined(0, 1, 8, 1000), c.Install(0, 1, 0))
    story.see(e.VersionInstalled(0, 0, 0, "d0"))
    story.start(0)
    assert story.broken == {Promise.VERIFIED}


# Placement


@pytest.mark.parametrize("end", [e.InstanceFailed(0, 0, "crash"), c.Expel(0, 0, "silent"), None])
def test_no_start_on_an_instance_that_is_not_alive(end: Any) -> None:
    story = Story()
    story.see(e.WeightsPublished(0, "d0"))
    if end is not None:
        story.host(0)
        if isinstance(end, c.Expel):
            story.ask(end)
        else:
            story.see(end)
    story.start(0)
    assert "on instance 0: not alive" in story.example(Promise.PLACEMENT)


def test_no_install_on_an_incarnation_that_is_not_alive() -> None:
    story = opened()
    story.ask(c.Expel(0, 0, "silent"))
    story.see(e.InstanceJoined(0, 0, 8, 1000))  # the expelled one again: still dead
    story.ask(c.Install(0, 0, 0))
    assert "incarnation not alive" in story.example(Promise.PLACEMENT)


def test_no_second_placement_of_what_runs() -> None:
    story = opened()
    story.host(1)
    story.start(0)
    story.start(0, instance=1)
    assert "which runs elsewhere" in story.example(Promise.PLACEMENT)


def test_no_dismissal_of_an_instance_that_holds_work() -> None:
    story = opened()
    story.start(0)
    story.see(e.InstanceLeaving(0, 0), c.Dismiss(0, 0))
    assert "which holds 1 trajectories" in story.example(Promise.PLACEMENT)


# Fencing


def test_a_zombie_that_is_scored_is_caught() -> None:
    story = opened()
    story.host(1)
    old = story.start(0)
    story.see(e.InstanceFailed(0, 0, "crash"))
    story.start(0, instance=1)
    event = e.TrajectoryFinished(0, old, 10, (Segment(0, "d0", 10),))
    story.see(event, c.Score(0, old))
    assert f"not whole under fence {old}" in story.example(Promise.FENCING)


def test_a_zombie_without_a_new_placement_is_caught() -> None:
    story = opened()
    old = story.start(0)
    story.ask(c.Expel(0, 0, "silent"))
    event = e.TrajectoryFinished(0, old, 10, (Segment(0, "d0", 10),))
    story.see(event, c.Score(0, old))
    assert story.broken == {Promise.FENCING}


def test_a_group_judged_before_a_member_is_scored_is_caught() -> None:
    story = opened()
    for member in (0, 1):
        story.start(member)
        story.finish(member, scored=member == 0)
    story.ask(c.Judge(0, (0, 1)))
    assert "trajectory 1 goes on without being scored" in story.example(Promise.FENCING)


def test_a_group_trained_before_it_is_judged_is_caught() -> None:
    story = opened()
    for member in (0, 1):
        story.start(member)
        story.finish(member)
    story.ask(c.Judge(0, (0, 1)))
    story.train(0, 0)
    assert "group 0 was not judged" in story.example(Promise.FENCING)


def test_a_group_that_was_never_started_is_caught() -> None:
    story = opened()
    story.train(0, 0)
    assert "group 0 was never started" in story.example(Promise.FENCING)
    story.ask(c.Judge(3, (6, 7)))
    assert story.broken == {Promise.FENCING}


def test_a_member_that_was_not_judged_is_caught_in_a_batch() -> None:
    story = opened(max_retries=0)
    story.start(0)
    story.finish(0)
    fence = story.start(1)
    story.see(e.TrajectoryFailed(1, fence, "boom"))
    story.ask(c.Judge(0, (0,)))
    story.see(e.GroupJudged(0))
    story.train(0, 0)
    assert "holds other members than were judged" in story.example(Promise.FENCING)


def test_what_is_whole_or_over_is_not_started_again() -> None:
    story = opened()
    story.ready(0)
    story.start(0)
    assert "which is whole" in story.example(Promise.FENCING)
    story = opened()
    story.ready(0)
    story.train(0, 0)
    story.trained(0)
    story.start(0)
    assert "its group is over" in story.example(Promise.FENCING)


def test_a_fence_is_not_given_out_twice() -> None:
    story = opened()
    story.host(1)
    fence = story.start(0)
    story.see(e.InstanceFailed(0, 0, "crash"), c.Start(0, fence, 1, 0))
    assert "with an old fence" in story.example(Promise.FENCING)


# Migration


def test_a_migration_that_commits_is_clean() -> None:
    story = opened()
    migrating(story)
    old = story.fences[0]
    story.see(e.MigrationCompleted(5, (Placement(0, old),)), c.Release(5))
    story.see(e.TrajectoryFinished(0, old, 9, (Segment(0, "d0", 9),)))  # the source's copy
    story.fences[0] = 90
    story.finish(0)
    assert story.broken == set()
    assert story.report.finished == 1


def test_a_finish_at_the_target_may_precede_the_end_of_the_transfer() -> None:
    story = opened()
    migrating(story)
    old = story.fences[0]
    story.fences[0] = 90
    story.finish(0)
    story.see(e.TrajectoryFinished(0, old, 9, (Segment(0, "d0", 9),)))
    story.see(e.MigrationCompleted(5, (Placement(0, old),)), c.Release(5), c.Cancel(0, 90, 1))
    assert story.broken == set()
    assert story.report.finished == 1


def test_until_the_end_of_the_transfer_only_the_source_can_fail_it() -> None:
    story = opened()
    migrating(story)
    story.see(e.TrajectoryFailed(0, 90, "boom"))
    story.finish(0)
    assert story.broken == set()
    assert story.report.finished == 1


def test_before_the_transfer_the_new_fence_means_nothing() -> None:
    story = opened()
    migrating(story, transfer=False)
    story.fences[0] = 90
    story.finish(0)
    assert story.broken == {Promise.FENCING}


@pytest.mark.parametrize("undo", [e.MigrationFailed(5, "link"), c.AbortMigration(5)])
def test_an_undone_migration_leaves_the_trajectory_where_it_was(undo: Any) -> None:
    story = opened()
    migrating(story)
    if isinstance(undo, c.AbortMigration):
        story.ask(undo)
    else:
        story.see(undo)
    story.finish(0)
    assert story.broken == set()
    story = opened()
    migrating(story)
    old = story.fences[0]
    story.ask(c.AbortMigration(5))
    story.see(e.MigrationCompleted(5, (Placement(0, old),)))
    story.fences[0] = 90
    story.finish(0)
    assert story.broken == {Promise.FENCING}


def test_a_completion_that_the_core_undoes_moves_nothing() -> None:
    story = opened()
    migrating(story)
    moved = (Placement(0, story.fences[0]),)
    story.see(e.MigrationCompleted(5, moved), c.AbortMigration(5))
    story.finish(0)
    assert story.broken == set()


def test_a_migration_ends_with_its_source_or_target() -> None:
    for lost in (0, 1):
        story = opened()
        migrating(story)
        story.see(e.InstanceFailed(lost, 0, "crash"))
        fence = story.fences[0]
        story.fence = 100
        if lost == 0:
            fence = story.start(0, instance=1)
        story.host(2)
        story.ask(c.Reserve(6, 1 - lost, 2, 0, (Move(0, fence, fence + 100),)))
        assert story.broken == set()


def reserve(story: Story, **changes: Any) -> None:
    values: dict[str, Any] = {
        "migration": 5,
        "source": 0,
        "target": 1,
        "version": 0,
        "moves": (Move(0, story.fences[0], 90),),
    }
    story.ask(c.Reserve(**{**values, **changes}))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"target": 2}, "target 2 does not serve version 0"),
        ({"target": 7}, "target 7 does not serve version 0"),
        ({"source": 1, "target": 0}, "trajectory 0 is not on instance 1"),
        ({"moves": (Move(0, 77, 90),)}, "trajectory 0 does not run under fence 77"),
        ({"moves": (Move(8, 1, 90),)}, "trajectory 8 does not run under fence 1"),
        ({"moves": (Move(0, 1, 1),)}, "trajectory 0 would get an old fence"),
    ],
)
def test_a_migration_that_may_not_be_is_caught(changes: dict[str, Any], what: str) -> None:
    story = opened()
    story.start(0)
    story.host(1)
    story.see(e.InstanceJoined(2, 0, 8, 1000), c.Install(2, 0, 0))
    reserve(story, **changes)
    assert what in story.example(Promise.MIGRATION)


def test_a_migration_from_a_dead_source_is_caught() -> None:
    story = opened()
    story.host(1)
    story.start(0)
    story.see(e.InstanceFailed(0, 0, "crash"))
    reserve(story, moves=())
    assert "source 0 is not alive" in story.example(Promise.MIGRATION)


def test_a_migration_to_another_version_is_caught() -> None:
    story = two_versions()
    reserve(story, version=1, moves=(Move(2, story.fences[2], 90),))
    assert "trajectory 2 is not of version 1" in story.example(Promise.MIGRATION)


def test_a_trajectory_in_two_migrations_is_caught() -> None:
    story = opened()
    migrating(story, transfer=False)
    story.host(2)
    reserve(story, migration=6, target=2)
    assert "in migration 5 already" in story.example(Promise.MIGRATION)
    story = opened()
    migrating(story, transfer=False)
    reserve(story)  # the same again is a repeat
    assert story.broken == set()


def test_a_transfer_or_release_out_of_order_is_caught() -> None:
    story = opened()
    story.ask(c.Transfer(5))
    assert "it is not under way" in story.example(Promise.MIGRATION)
    story = opened()
    migrating(story)
    story.ask(c.Release(5))
    assert "the target does not have it yet" in story.example(Promise.MIGRATION)


def test_mixing_versions_on_migration_is_caught() -> None:
    story = two_versions()
    reserve(story, version=0, moves=(Move(2, story.fences[2], 90),))
    assert "target 1 does not serve version 0" in story.example(Promise.MIGRATION)
