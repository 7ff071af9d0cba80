"""The driver: hands events to the core and turns its commands into messages to the parts.

    commands = orchestrator.handle(now, event)

It holds what the core must not know, tokens, rewards and where a message has to go, and takes no
decision of its own. It keeps no time and starts no process: a runtime brings both as `Outside`.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dora_rl.core import commands as cm
from dora_rl.core import events as ev
from dora_rl.core.commands import Command
from dora_rl.core.errors import RefusedEvent
from dora_rl.core.events import Event
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import (
    Fence,
    GroupId,
    InstanceId,
    MigrationId,
    TrajectoryId,
    Version,
)
from dora_rl.runtime import messages as ms
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.shelf import Shelf
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.task import Task
from dora_rl.tasks.workers.scores import Outcome, ScoreJob
from dora_rl.tasks.workers.sessions import EnvReply

_PROMPTS = 1024  # kept for siblings and scores; others are read again


class Outside(Protocol):
    """What a runtime does for the driver. Nothing here waits for an answer."""

    def now(self) -> float: ...

    def set_timer(self, at: float) -> None:
        """Call `Driver.ring` at this time; replaces the time set before."""

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None:
        """Messages to one instance arrive in order, or not at all if it is gone."""

    def to_every_rollout(self, message: ms.ToRollout) -> None: ...

    def to_trainer(self, message: ms.ToTrainer) -> None: ...

    def expel(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        """Kill this incarnation, and start a higher one."""

    def delete(self, version: Version) -> None: ...

    def score(self, ticket: int, job: ScoreJob) -> None:
        """Answered by `Driver.scored`."""

    def open_episode(self, ticket: int, example: dict[str, Any]) -> None:
        """Answered, like `step_episode`, by `Driver.answered`."""

    def step_episode(self, ticket: int, text: str) -> None: ...

    def discard_episode(self, ticket: int) -> None: ...


@dataclass(slots=True)
class _Placed:
    """Where a trajectory is, as the core wants it."""

    instance: InstanceId
    fence: Fence
    version: Version
    session: int | None = None  # its environment, by the ticket that opened it
    prompt: tuple[int, ...] = ()
    reward: float = 0.0  # of the turns so far
    turns: int = 0  # that its environment has been told of
    room: int = 0  # tokens that it may still have
    answer: ms.Continue | ms.Conclude | None = None  # not taken in yet


class Driver:
    """One run's translation between the core and its parts."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        task: Task,
        judge: Callable[[Sequence[float]], str | None],
        outside: Outside,
        exchange: Path,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._orchestrator = orchestrator
        self._task = task
        self._judge_rewards = judge
        self._outside = outside
        self._exchange = exchange
        self.listeners = list(listeners)
        self.shelf = Shelf()
        self.halted: cm.Halt | None = None
        self._prefixes: dict[TrajectoryId, ms.Prefix] = {}
        self._holding = False
        self._frozen = False
        self._inbox: deque[Event] = deque()
        self._prompts: dict[GroupId, Prompt] = {}
        self._placed: dict[TrajectoryId, _Placed] = {}
        self._sessions: dict[int, TrajectoryId] = {}
        self._migrations: dict[MigrationId, cm.Reserve] = {}
        self._scoring: dict[Fence, TrajectoryId] = {}
        self._batch: cm.Train | None = None
        self._group_size = orchestrator.settings.group_size
        self._perform: dict[type, Callable[[Any], None]] = {
            cm.FetchPrompts: self._fetch,
            cm.Start: self._start,
            cm.Cancel: self._cancel,
            cm.Install: self._to_instance,
            cm.Evict: self._to_instance,
            cm.Park: self._to_instance,
            cm.Unpark: self._unpark,
            cm.Reserve: self._reserve,
            cm.Transfer: self._transfer,
            cm.Release: self._release,
            cm.AbortMigration: self._abort,
            cm.Score: self._score,
            cm.Judge: self._judge,
            cm.Fail: self._fail,
            cm.Train: self._train,
            cm.Publish: lambda c: outside.to_trainer(ms.PublishVersion(c.version)),
            cm.Delete: lambda c: outside.delete(c.version),
            cm.Suspend: lambda c: outside.to_every_rollout(ms.Perform.of(c)),
            cm.Resume: lambda c: outside.to_every_rollout(ms.Perform.of(c)),
            cm.Expel: lambda c: outside.expel(c.instance, c.incarnation, c.reason),
            cm.Dismiss: lambda c: outside.to_rollout(c.instance, ms.Shutdown()),
            cm.SetTimer: lambda c: outside.set_timer(c.at),
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
        now = self._outside.now()
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
        return self._orchestrator.state.ledger.trajectories

    def reject_batch(self, reason: str) -> None:
        """The batch that is being trained kills whoever trains it."""
        batch = self._batch
        if batch is not None:
            groups = tuple(group.group for group in batch.groups)
            self.post(ev.BatchRejected(batch.step, groups, reason))

    def ask_trainer_again(self) -> None:
        """The trainer is another one: it has heard of nothing that was asked."""
        for command in self._orchestrator.outstanding():
            if isinstance(command, cm.Train | cm.Publish):
                self.perform(command)

    def ring(self) -> None:
        """The time of the last `set_timer` has come."""
        self.post(ev.TimerFired())

    def lost(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        """A rollout process is gone."""
        self.post(ev.InstanceFailed(instance, incarnation, reason))

    # What the parts say

    def from_rollout(self, instance: InstanceId, message: ms.FromRollout) -> None:
        match message:
            case ms.Reported():
                self._reported(message.event)
            case ms.Finished():
                self._finished(message)
            case ms.TurnEnded():
                self._turn_ended(message)
            case ms.HandedOver():
                self._handed_over(message)
            case ms.Used():
                now = self._outside.now()
                for listener in self.listeners:
                    listener.used(now, instance, message)
            case ms.Prefixes():
                for prefix in message.prefixes:
                    self._save(prefix)
                self._reported(message.event)

    def _save(self, prefix: ms.Prefix) -> None:
        """Keep what a trajectory has written, if it is the placement that counts."""
        placed = self._placed.get(prefix.trajectory)
        if placed is None or placed.fence != prefix.fence:
            return
        before = self._prefixes.get(prefix.trajectory)
        if before is not None and before.fence == prefix.fence and _end(prefix) <= _end(before):
            return  # said again: the core counts on what came since
        whole = self.keep_prefix(prefix)
        for listener in self.listeners:
            listener.saved(prefix, whole)

    def keep_prefix(self, prefix: ms.Prefix) -> ms.Prefix:
        """What the trajectory had written, with what it has written since."""
        before = self._prefixes.get(prefix.trajectory)
        whole = prefix if before is None else prefix.after(before)
        self._prefixes[prefix.trajectory] = whole
        return whole

    def _reported(self, event: Event) -> None:
        match event:
            case ev.TrajectoryResumed():
                placed = self._placed.get(event.trajectory)
                spoken = event.fence, event.turn  # said again, it speaks of an earlier answer
                if placed is not None and (placed.fence, placed.turns) == spoken:
                    placed.answer = None
            case ev.MigrationCompleted():
                self._moved(event)
                return
        self.post(event)

    def _finished(self, message: ms.Finished) -> None:
        trajectory, fence = message.trajectory, message.fence
        name = trajectory.trajectory
        placed = self._placed.get(name)
        reward = None
        if placed is not None and placed.session is not None:
            reward = placed.reward
        self.shelf.arrive(trajectory, fence, reward)
        self.post(ev.TrajectoryFinished(name, fence, trajectory.num_sampled, trajectory.segments))
        self.shelf.forget_arrival(name, fence)
        if name in self.shelf:
            self._leave(name)

    def from_trainer(self, message: ms.FromTrainer) -> None:
        now = self._outside.now()
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
                    return  # said again: it must not be saved, or evaluated, anew
                for listener in self.listeners:
                    listener.published(now, message)
                self.post(ev.WeightsPublished(message.version, message.digest))
            case ms.NotPublished():
                self.post(ev.PublicationFailed(message.version, message.reason))

    def _trained(self, now: float, message: ms.Trained) -> None:
        batch = self._batch
        if batch is not None and batch.step == message.step:
            members = [name for group in batch.groups for name in group.trajectories]
            samples = [self.shelf.sample(name) for name in members]
            for listener in self.listeners:
                listener.trained(now, message, samples)
            self._batch = None
            for name in members:
                self._discard(name)
        self.post(ev.BatchTrained(message.step))

    # Prompts, scores, batches

    def _fetch(self, command: cm.FetchPrompts) -> None:
        found = len(self._task.stream.read(command.first, command.count))
        self.post(ev.PromptsAvailable(command.first, found, exhausted=found < command.count))

    def _score(self, command: cm.Score) -> None:
        name, fence = command.trajectory, command.fence
        self.shelf.accept(name, fence)
        self._keep(name)
        if not self._task.rewards:  # its environment has given all of it
            self._give_reward(name, 0.0, {})
            self.post(ev.TrajectoryScored(name, fence))
            return
        self._scoring[fence] = name
        trajectory = self.shelf.trajectory(name)
        response = self._task.encoder.decode(trajectory.tokens)
        job = self._task.job(self._prompt(trajectory.group), response, trajectory)
        self._outside.score(fence, job)

    def _give_reward(self, name: TrajectoryId, reward: float, parts: dict[str, float]) -> None:
        episode = self.shelf.episode_reward(name)
        if episode is not None:
            reward, parts = reward + episode, {**parts, "environment": episode}
        self.shelf.reward(name, reward, parts)
        self._keep(name)

    def _keep(self, name: TrajectoryId) -> None:
        for listener in self.listeners:
            listener.kept(self.shelf.item(name))

    def scored(self, outcome: Outcome) -> None:
        """Answers `Outside.score`."""
        name = self._scoring.pop(outcome.ticket, None)
        if name is None or name not in self.shelf:
            return
        if outcome.failure is not None:
            reason = f"reward: {outcome.failure}"
            self.post(ev.TrajectoryFailed(name, outcome.ticket, reason))
        else:
            self._give_reward(name, outcome.reward, outcome.parts)
            self.post(ev.TrajectoryScored(name, outcome.ticket))

    def _judge(self, command: cm.Judge) -> None:
        rewards = [self.shelf.sample(name).reward for name in command.trajectories]
        verdict = self._judge_rewards(rewards)
        if verdict is not None:
            for name in command.trajectories:
                self._discard(name)
        self.post(ev.GroupJudged(command.group, verdict))

    def _train(self, command: cm.Train) -> None:
        self._batch = command
        if self._holding:
            return
        samples = tuple(
            self.shelf.sample(name) for group in command.groups for name in group.trajectories
        )
        groups = tuple(group.group for group in command.groups)
        self._outside.to_trainer(ms.TrainOn(command.step, groups, samples))

    def _fail(self, command: cm.Fail) -> None:
        self._leave(command.trajectory)
        self._discard(command.trajectory)

    def _discard(self, name: TrajectoryId) -> None:
        """The trajectory is terminal."""
        self.shelf.discard(name)
        self._prefixes.pop(name, None)

    def _halt(self, command: cm.Halt) -> None:
        self.halted = command

    # Placements

    def _to_instance(self, command: cm.Install | cm.Evict | cm.Park | cm.Unpark) -> None:
        self._outside.to_rollout(command.instance, ms.Perform.of(command))

    def _start(self, command: cm.Start) -> None:
        name = command.trajectory
        self._leave(name)
        placed = _Placed(command.instance, command.fence, command.version)
        self._placed[name] = placed
        prompt = self._prompt(self._group(name))
        if self._task.has_environment:
            placed.session = command.fence
            self._sessions[command.fence] = name
            self._outside.open_episode(command.fence, prompt.example)
        else:
            placed.prompt = tuple(self._task.encoder.encode(prompt))
            self._begin(name, placed, self._prefix(command))

    def _prefix(self, command: cm.Start) -> ms.Prefix | None:
        if not command.prefix_tokens:
            return None
        return self._prefixes[command.trajectory].cut(command.prefix_tokens)

    def _begin(self, name: TrajectoryId, placed: _Placed, prefix: ms.Prefix | None) -> None:
        self._outside.to_rollout(
            placed.instance,
            ms.Begin(
                name,
                placed.fence,
                self._group(name),
                placed.version,
                placed.prompt,
                episode=placed.session is not None,
                prefix=prefix,
            ),
        )

    def _cancel(self, command: cm.Cancel) -> None:
        placed = self._placed.get(command.trajectory)
        if placed is not None and placed.fence == command.fence:
            self._leave(command.trajectory)
        self._outside.to_rollout(command.instance, ms.Perform.of(command))

    def _leave(self, name: TrajectoryId) -> None:
        """The trajectory is nowhere any more, and its environment is not needed."""
        placed = self._placed.pop(name, None)
        if placed is not None and placed.session is not None:
            del self._sessions[placed.session]
            self._outside.discard_episode(placed.session)

    def _unpark(self, command: cm.Unpark) -> None:
        self._to_instance(command)
        for name, _ in command.placements:
            self._answer_again(name)

    def _prompt(self, group: GroupId) -> Prompt:
        """A prompt by its position; siblings ask for it one after the other."""
        prompt = self._prompts.get(group)
        if prompt is None:
            prompt = self._prompts[group] = self._task.stream.read(group, 1)[0]
            if len(self._prompts) > _PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        return prompt

    def _group(self, name: TrajectoryId) -> GroupId:
        return name // self._group_size

    # Episodes

    def answered(self, reply: EnvReply) -> None:
        """Answers `Outside.open_episode` and `Outside.step_episode`."""
        name = self._sessions.get(reply.ticket)
        if name is None:
            return
        placed = self._placed[name]
        if reply.failure is not None:
            self.post(ev.TrajectoryFailed(name, placed.fence, f"environment: {reply.failure}"))
            return
        placed.reward += reply.reward
        if not placed.prompt:
            prompt = self._prompt(self._group(name))
            placed.prompt = tuple(self._task.encoder.encode(prompt, reply.observation))
            self._begin(name, placed, None)
            return
        self._answer(name, placed, reply)

    def _turn_ended(self, message: ms.TurnEnded) -> None:
        placed = self._placed.get(message.trajectory)
        if placed is None or placed.fence != message.fence or placed.session is None:
            return
        if message.turn < placed.turns:
            return  # said again: an environment must not take a step twice
        placed.turns, placed.room = message.turn + 1, message.room
        self._outside.step_episode(placed.session, self._task.encoder.decode(message.tokens))

    def _answer(self, name: TrajectoryId, placed: _Placed, reply: EnvReply) -> None:
        tokens: tuple[int, ...] = ()
        over = reply.done or placed.turns >= self._task.settings.max_turns
        if not over:
            tokens = tuple(self._task.encoder.observation(str(reply.observation or "")))
            over = not tokens or len(tokens) >= placed.room
        placed.answer = (
            ms.Conclude(name, placed.fence)
            if over
            else ms.Continue(name, placed.fence, placed.turns - 1, tokens)
        )
        self._outside.to_rollout(placed.instance, placed.answer)

    def _answer_again(self, name: TrajectoryId) -> None:
        """The trajectory may have been out of reach when its answer came."""
        placed = self._placed.get(name)
        if placed is not None and placed.answer is not None:
            placed.answer = msgspec.structs.replace(placed.answer, fence=placed.fence)
            self._outside.to_rollout(placed.instance, placed.answer)

    # Migrations

    def _reserve(self, command: cm.Reserve) -> None:
        self._migrations[command.migration] = command
        self._outside.to_rollout(command.target, ms.Perform.of(command))

    def _transfer(self, command: cm.Transfer) -> None:
        reserve = self._migrations[command.migration]
        file = self._file(command.migration)
        self._outside.to_rollout(
            reserve.source, ms.HandOver(command.migration, reserve.moves, str(file))
        )

    def _handed_over(self, message: ms.HandedOver) -> None:
        reserve = self._migrations.get(message.migration)
        file = self._file(message.migration)
        if reserve is None:
            file.unlink(missing_ok=True)
        elif message.failure is not None:
            self.post(ev.MigrationFailed(message.migration, message.failure))
        else:
            self._outside.to_rollout(reserve.target, ms.TakeOver(message.migration, str(file)))

    def _moved(self, event: ev.MigrationCompleted) -> None:
        reserve = self._migrations.get(event.migration)
        self.post(event)
        if reserve is None or event.migration in self._migrations:
            return  # the core did not take it
        fences = {(move.trajectory, move.fence): move.new_fence for move in reserve.moves}
        for placement in event.moved:
            placed = self._placed.get(placement.trajectory)
            if placed is not None and placed.fence == placement.fence:
                placed.instance = reserve.target
                placed.fence = fences[placement]
                self._answer_again(placement.trajectory)

    def _release(self, command: cm.Release) -> None:
        reserve = self._migrations.pop(command.migration)
        self._outside.to_rollout(reserve.source, ms.Perform.of(command))

    def _abort(self, command: cm.AbortMigration) -> None:
        reserve = self._migrations.pop(command.migration, None)
        if reserve is None:
            return
        for instance in (reserve.source, reserve.target):
            self._outside.to_rollout(instance, ms.Perform.of(command))
        self._file(command.migration).unlink(missing_ok=True)
        for move in reserve.moves:
            self._answer_again(move.trajectory)

    def _file(self, migration: MigrationId) -> Path:
        return self._exchange / f"migration-{migration}"


def _end(prefix: ms.Prefix) -> int:
    """Its length with all that was written before it."""
    return prefix.start + len(prefix.tokens)
