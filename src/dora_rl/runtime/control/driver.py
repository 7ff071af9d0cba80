"""The driver: hands events to the core and turns its commands into messages to the workers.

    commands = orchestrator.handle(now, event)

It holds what the core must not know: rewards, references to tokens, where a message has to go.
What to generate, train or publish next is the core's decision, which worker is replaced the
supervisor's; the driver decides only whether a message is news: duplicates, and what a superseded
placement says, end here. It keeps no time, starts no process and waits for nothing (`services`).
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import InstanceId, TrajectoryId
from dora_rl.core.state.run import TrainerPhase
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.heartbeats import Heartbeats
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.migrations import Migrations
from dora_rl.runtime.control.placements import Placements
from dora_rl.runtime.control.prompts import PromptCache
from dora_rl.runtime.control.scoring import Scoring
from dora_rl.runtime.control.services import (
    Clock,
    EnvironmentHost,
    Scorer,
    Timer,
    WeightStorage,
    WorkerLink,
)
from dora_rl.runtime.control.trajectory_buffer import TrajectoryBuffer
from dora_rl.tasks.task import Task
from dora_rl.transports.kv import KvControl
from dora_rl.transports.samples import SampleSource


class Driver:
    """One run's translation between the core and its workers."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        task: Task,
        judge: Callable[[Sequence[float]], str | None],
        *,
        clock: Clock,
        timer: Timer,
        workers: WorkerLink,
        scorer: Scorer,
        environments: EnvironmentHost,
        weights: WeightStorage,
        samples: SampleSource,
        kv: KvControl,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._orchestrator = orchestrator
        self._task = task
        self._clock = clock
        self._workers = workers
        self.listeners = list(listeners)
        self.buffer = TrajectoryBuffer()
        self.halted: cm.Halt | None = None
        self._holding = False
        self._frozen = False
        self._inbox: deque[Event] = deque()
        self._batch: cm.Train | None = None
        self._heartbeats = Heartbeats(orchestrator.settings)
        prompts = PromptCache(task, orchestrator.settings.group_size)
        self._scoring = Scoring(
            task, prompts, self.buffer, samples, scorer, judge, self.post, self.listeners
        )
        self._placements = Placements(
            task, prompts, workers, environments, self.post, self.listeners
        )
        self._migrations = Migrations(workers, self._placements, self.post, kv)
        self._perform = self._table(timer, weights)

    def _table(self, timer: Timer, weights: WeightStorage) -> dict[type, Callable[[Any], None]]:
        """Who performs which command."""
        workers, placements, migrations = self._workers, self._placements, self._migrations
        return {
            cm.FetchPrompts: self._fetch,
            cm.Start: placements.start,
            cm.Cancel: placements.cancel,
            cm.Install: self._to_instance,
            cm.Evict: self._to_instance,
            cm.Park: self._to_instance,
            cm.Sleep: self._to_instance,
            cm.Wake: self._to_instance,
            cm.Unpark: placements.unpark,
            cm.Reserve: migrations.reserve,
            cm.Transfer: migrations.transfer,
            cm.Release: migrations.release,
            cm.AbortMigration: migrations.abort,
            cm.Score: self._scoring.score,
            cm.Judge: self._judge,
            cm.Fail: self._fail,
            cm.Train: self._train,
            cm.Publish: lambda c: workers.to_trainer(ms.PublishVersion(c.version)),
            cm.Delete: lambda c: weights.delete(c.version),
            cm.Suspend: lambda c: workers.to_every_rollout(ms.Perform.of(c)),
            cm.Resume: lambda c: workers.to_every_rollout(ms.Perform.of(c)),
            cm.Expel: lambda c: workers.expel(c.instance, c.incarnation, c.reason),
            cm.Dismiss: lambda c: workers.to_rollout(c.instance, ms.Shutdown()),
            cm.SetTimer: lambda c: timer.set(c.at),
            cm.Halt: self._halt,
        }

    # Events

    def post(self, event: Event) -> None:
        """Hand an event to the core, with all that it leads to at once."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return  # we are inside: its turn comes
        while self._inbox:
            if self.halted is None and not self._frozen:
                self._hand_over(self._inbox[0])
            self._inbox.popleft()

    def _hand_over(self, event: Event) -> None:
        now = self._clock.now()
        try:
            commands = self._orchestrator.handle(now, event)
        except RefusedEvent as error:
            for listener in self.listeners:
                listener.refused(now, event, str(error))
            return
        for listener in self.listeners:
            listener.observed(now, event, commands)
        for command in commands:
            self.perform(command)

    def perform(self, command: Command) -> None:
        """Do what the core asks for."""
        self._perform[type(command)](command)

    def hold(self) -> None:
        """Train no further batch."""
        self._holding = True

    def freeze(self) -> None:
        """Take no event in any more: what comes now is as if it had not happened."""
        self._frozen = True

    @property
    def outstanding(self) -> Container[TrajectoryId]:
        """The trajectories that are issued and not terminal, or whose group is not."""
        return self._orchestrator.state.work.trajectories

    @property
    def training(self) -> bool:
        """Whether the trainer was sent a batch that it has not answered; not one that is held."""
        training = self._orchestrator.state.trainer.phase is TrainerPhase.TRAINING
        return training and self._batch is not None and not self._holding

    def reject_batch(self, reason: str) -> None:
        """The batch that is out kills the trainer."""
        batch = self._batch
        assert batch is not None
        groups = tuple(group.group for group in batch.groups)
        self.post(ev.BatchRejected(batch.step, groups, reason))

    def ask_trainer_again(self) -> None:
        """The trainer is another one: it has heard of nothing that was asked."""
        for command in self._orchestrator.unanswered():
            if isinstance(command, cm.Train | cm.Publish):
                self.perform(command)

    def ring(self) -> None:
        """The time of the last `Timer.set` has come."""
        self.post(ev.TimerFired())

    def lost(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        """A rollout process is gone."""
        self.post(ev.InstanceFailed(instance, incarnation, reason))

    # What the workers say

    def from_rollout(self, instance: InstanceId, message: ms.FromRollout) -> None:
        match message:
            case ms.Reported():
                self._reported(message.event)
            case ms.Finished():
                self._finished(message)
            case ms.TurnEnded():
                self._placements.turn_ended(message)
            case ms.HandedOver():
                self._migrations.handed_over(message)
            case ms.Used():
                now = self._clock.now()
                for listener in self.listeners:
                    listener.used(now, instance, message)
            case ms.Prefixes():
                for prefix in message.prefixes:
                    self._placements.save(prefix)
                self._reported(message.event)

    def keep_prefix(self, prefix: ms.Prefix) -> None:
        """What a trajectory had written in an earlier incarnation of the run."""
        self._placements.keep_prefix(prefix)

    def _reported(self, event: Event) -> None:
        match event:
            case ev.TrajectoryResumed():
                self._placements.resumed(event)
            case ev.MigrationCompleted():
                self._migrations.completed(event)
                return
            case ev.InstanceJoined():
                self._heartbeats.joined(event)
            case ev.InstanceProgressed():
                if not self._heartbeats.is_news(self._clock.now(), event):
                    return
        self.post(event)

    def _finished(self, message: ms.Finished) -> None:
        trajectory, fence = message.trajectory, message.fence
        trajectory_id = trajectory.id
        self.buffer.arrive(trajectory, fence, self._placements.episode_reward(trajectory_id))
        self.post(
            ev.TrajectoryFinished(trajectory_id, fence, trajectory.num_sampled, trajectory.segments)
        )
        self.buffer.forget_arrival(trajectory_id, fence)
        if trajectory_id in self.buffer:
            self._placements.leave(trajectory_id)

    def from_trainer(self, message: ms.FromTrainer) -> None:
        now = self._clock.now()
        match message:
            case ms.Trained():
                self._trained(now, message)
            case ms.Rejected():
                for listener in self.listeners:
                    listener.rejected(now, message)
                self.post(ev.BatchRejected(message.step, message.groups, message.reason))
            case ms.TrainingFailed():
                self.post(ev.BatchFailed(message.step, message.reason))
            case ms.Published():
                if message.version <= self._orchestrator.state.versions.newest:
                    return  # a duplicate: it must not be saved, or evaluated, anew
                for listener in self.listeners:
                    listener.published(now, message)
                self.post(ev.WeightsPublished(message.version, message.digest))
            case ms.NotPublished():
                self.post(ev.PublicationFailed(message.version, message.reason))

    def _trained(self, now: float, message: ms.Trained) -> None:
        batch = self._batch
        if batch is not None and batch.step == message.step:
            members = [
                trajectory_id for group in batch.groups for trajectory_id in group.trajectories
            ]
            samples = [self.buffer.sample(trajectory_id) for trajectory_id in members]
            for listener in self.listeners:
                listener.trained(now, message, samples)
            self._batch = None
            for trajectory_id in members:
                self._discard(trajectory_id)
        self.post(ev.BatchTrained(message.step))

    # Prompts, groups, batches

    def _fetch(self, command: cm.FetchPrompts) -> None:
        found = len(self._task.stream.read(command.first, command.count))
        self.post(ev.PromptsAvailable(command.first, found, exhausted=found < command.count))

    def _judge(self, command: cm.Judge) -> None:
        verdict = self._scoring.verdict(command.trajectories)
        if verdict is not None:
            for trajectory_id in command.trajectories:
                self._discard(trajectory_id)
        self.post(ev.GroupJudged(command.group, verdict))

    def _train(self, command: cm.Train) -> None:
        self._batch = command
        if self._holding:
            return
        samples = tuple(
            self.buffer.sample(trajectory_id)
            for group in command.groups
            for trajectory_id in group.trajectories
        )
        groups = tuple(group.group for group in command.groups)
        self._workers.to_trainer(ms.TrainOn(command.step, groups, samples))

    def _fail(self, command: cm.Fail) -> None:
        self._placements.leave(command.trajectory)
        self._discard(command.trajectory)

    def _discard(self, trajectory_id: TrajectoryId) -> None:
        """The trajectory is terminal."""
        self.buffer.discard(trajectory_id)
        self._placements.forget_prefix(trajectory_id)

    def _halt(self, command: cm.Halt) -> None:
        self.halted = command

    def _to_instance(self, command: cm.Install | cm.Evict | cm.Park | cm.Sleep | cm.Wake) -> None:
        self._workers.to_rollout(command.instance, ms.Perform.of(command))
