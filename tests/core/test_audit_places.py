"""The audit of places: leases, installs, placements and fences."""

from typing import Any

import pytest

from dora_rl.core.audit import Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.types import Placement, Segment
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
    assert "trajectory 1 continues without a score" in story.example(Promise.FENCING)


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
    assert "Start of trajectory 0, which is over" in story.example(Promise.FENCING)


def test_a_fence_is_not_given_out_twice() -> None:
    story = opened()
    story.host(1)
    fence = story.start(0)
    story.see(e.InstanceFailed(0, 0, "crash"), c.Start(0, fence, 1, 0))
    assert "with an old fence" in story.example(Promise.FENCING)


# Devices of both roles


def lending() -> Story:
    """An instance on the trainer's devices has been woken, and a batch is there."""
    story = opened(elastic="rollout")
    story.see(e.InstanceJoined(5, 0, 8, 1000, 1, elastic=True))
    story.ready(0)
    story.ask(c.Wake(5, 0))
    story.see(e.InstanceWoke(5, 0), c.Install(5, 0, 0))
    story.see(e.VersionInstalled(5, 0, 0, "d0"))
    return story


def test_training_on_lent_devices_is_caught() -> None:
    story = lending()
    story.ask(c.Sleep(5, 0))
    story.train(0, 0)
    assert "step 0 while rollout has those of 5" in story.example(Promise.DEVICES)


@pytest.mark.parametrize("back", ["slept", "failed", "expelled", "superseded"])
def test_devices_that_are_back_may_train(back: str) -> None:
    story = lending()
    if back == "slept":
        story.ask(c.Sleep(5, 0))
        story.see(e.InstanceSlept(5, 0))
    elif back == "failed":
        story.see(e.InstanceFailed(5, 0, "crash"))
    elif back == "expelled":
        story.ask(c.Expel(5, 0, "silent"))
    else:
        story.see(e.InstanceJoined(5, 1, 8, 1000, 1, elastic=True))
    story.train(0, 0)
    assert story.broken == set()


def test_a_late_word_that_it_sleeps_does_not_count() -> None:
    story = lending()
    story.see(e.InstanceSlept(5, 0))  # of before it was woken
    story.train(0, 0)
    assert story.broken == {Promise.DEVICES}


def test_an_instance_sent_to_sleep_under_its_work_is_caught() -> None:
    story = lending()
    story.start(2, instance=5)
    story.ask(c.Sleep(5, 0))
    assert "eviction of version 0 from instance 5" in story.example(Promise.LEASES)
