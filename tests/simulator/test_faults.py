"""Streams of draws, and what they do to messages."""

from typing import Any

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Move
from dora_rl.simulator.clock import Clock
from dora_rl.simulator.faults import FaultParams, Faults
from dora_rl.simulator.network import Network
from tests.simulator.scripted import Script, build, installing, publish_next, shape


def test_no_rates_no_faults() -> None:
    faults = Faults(FaultParams(), 0)
    assert not faults.params.any
    assert not faults.strikes(0.0, "x", 0.0, "nothing")
    assert faults.next_after_s("x", 0.0) is None
    assert faults.log == []


def test_streams_are_apart_and_seeded() -> None:
    def draws(seed: int, others: int) -> list[float]:
        faults = Faults(FaultParams(), seed)
        for _ in range(others):
            faults.lasting_s("other", 1.0)
        return [faults.lasting_s("one", 1.0) for _ in range(5)]

    assert draws(1, 0) == draws(1, 7)
    assert draws(1, 0) != draws(2, 0)


def test_every_fault_is_logged_and_can_be_printed() -> None:
    faults = Faults(FaultParams(), 0)
    assert faults.strikes(12.5, "failed_train", 1.0, "step 3")
    assert str(faults.log[0]) == "      12.500s  failed_train         step 3"


def test_commands_keep_their_order_and_events_do_not() -> None:
    clock = Clock()
    heard: list[Any] = []
    faults = Faults(FaultParams(delayed=0.7, delay_s=5.0, duplicated=0.2), 1)
    network = Network(clock, faults, heard.append)
    got: list[int] = []
    for n in range(200):
        network.send("here", got.append, n)
        network.report(ev.BatchTrained(n))
    while clock.next_time() is not None:
        clock.step()
    assert got == sorted(got)
    assert set(got) == set(range(200))
    steps = [event.step for event in heard]
    assert steps != sorted(steps)
    assert set(steps) == set(range(200))
    assert len(steps) > 200


def test_lost_messages_are_lost_both_ways() -> None:
    clock = Clock()
    heard: list[Any] = []
    network = Network(clock, Faults(FaultParams(lost=0.5), 1), heard.append)
    got: list[int] = []
    for n in range(200):
        network.send("here", got.append, n)
        network.report(ev.BatchTrained(n))
    assert 50 < len(got) < 150
    assert 50 < len(heard) < 150


def failing(kind: str) -> tuple[Any, Any]:
    """A run in which `kind` strikes at least once; whatever fails is asked for again."""
    for seed in range(20):
        script = installing()
        publish_next(script, 0, at=1.0)
        script.on(ev.BatchFailed, lambda e: [cmd.Train(e.step, ())])
        script.on(ev.PublicationFailed, lambda e: [cmd.Publish(e.version)])
        script.on(ev.InstallFailed, lambda e: [cmd.Install(e.instance, e.incarnation, e.version)])
        world = build(script, seed=seed, faults=FaultParams(**{kind: 0.5}))
        world.run(until_s=400)
        if any(fault.kind == kind for fault in world.faults.log):
            return world, script
    raise AssertionError(f"{kind} never struck")


def test_a_failed_step_leaves_the_weights_as_they_were() -> None:
    world, script = failing("failed_train")
    assert script.seen(ev.BatchFailed)
    assert script.last(ev.WeightsPublished).version == world.trainer.steps == 1


def test_a_rejected_batch_is_rejected_again_when_it_is_asked_for_again() -> None:
    world, script = failing("rejected_batch")
    answer = script.last(ev.BatchRejected)
    assert (answer.step, answer.groups, world.trainer.steps) == (0, (), 0)


def test_a_failed_publication_shows_nothing() -> None:
    world, script = failing("failed_publication")
    assert script.seen(ev.PublicationFailed)
    assert world.store.versions == {0, 1}


def test_a_failed_install_changes_nothing() -> None:
    world, script = failing("failed_install")
    assert script.seen(ev.InstallFailed)
    assert world.instances[0].versions == {0: "v0"}


def test_wrong_weights_are_what_the_engine_reports() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: [cmd.Start(0, 1, 0, 0)])
    world = build(script, faults=FaultParams(wrong_digest=1.0))
    world.run(until_s=20)
    assert script.last(ev.VersionInstalled).digest == "corrupt-v0"
    assert script.last(ev.TrajectoryFinished).segments == ((0, "corrupt-v0", 100),)


def test_an_endless_environment_never_answers() -> None:
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    shapes = {0: shape((100, 1.0, 0), 100)}
    world = build(script, shapes, faults=FaultParams(endless_environment=1.0))
    world.run(until_s=500)
    assert script.seen(ev.TrajectoryPaused)
    assert not script.seen(ev.TrajectoryResumed)


def test_a_failed_kv_path_computes_the_prefix_again() -> None:
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    script.at(1.5, cmd.Reserve(0, 0, 1, 0, (Move(0, 1, 2),)))
    script.on(ev.MigrationReserved, lambda e: [cmd.Transfer(e.migration)])
    script.on(ev.MigrationCompleted, lambda e: [cmd.Release(e.migration)])
    world = build(script, instances=2, faults=FaultParams(failed_kv_path=1.0))
    world.run(until_s=20)
    assert script.last(ev.TrajectoryFinished).fence == 2
    assert world.facts.kv_bytes_moved == 0
    assert world.facts.reprefilled_tokens > 50


def test_an_instance_announces_itself_until_somebody_speaks_to_it() -> None:
    script = Script()
    world = build(script, faults=FaultParams(lost=1e-9), report_period_s=1.0)
    world.run(until_s=5.5)
    assert len(script.seen(ev.InstanceJoined)) == 6
    script.at(5.7, cmd.Install(0, 1, 0))
    world._perform[cmd.SetTimer](cmd.SetTimer(5.7))
    world.run(until_s=12.0)
    assert len(script.seen(ev.InstanceJoined)) == 6
