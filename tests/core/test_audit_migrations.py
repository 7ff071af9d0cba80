"""The audit of migrations: who moves where, under which fence, and whether it may."""

from typing import Any

import pytest

from dora_rl.core.audit import Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.types import Move, Placement, Segment
from tests.core.story import Story, migrating, opened, two_versions


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


def test_wrong_weights_at_the_target_leave_the_trajectory_at_the_source() -> None:
    story = opened()
    migrating(story)
    event = e.TrajectoryFinished(0, 90, 10, (Segment(0, "other", 10),))
    story.see(event, c.AbortMigration(5), c.Expel(1, 0, "wrong weights"))
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
