"""The evaluation set, answered by one pinned version at a time, apart from training.

An instance of its own generates; the core knows of it only that it holds a version's weights.
What is found is never trained on, and training never waits for it, but for the last one.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import Fence, TrajectoryId, Version
from dora_rl.core.state.versions import Versions
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import EVALUATOR_INSTANCE
from dora_rl.runtime.control.episodes import Episode
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.services import Clock, EnvironmentHost, Scorer, WorkerLink
from dora_rl.samples import unpack
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.scores import Outcome
from dora_rl.tasks.task import Task
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples import SampleSource

_HOLDER = "evaluation"  # of the pinned version; and whom logs name

_log = logging.getLogger(__name__)


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """One evaluation, as `metrics.jsonl` has it."""

    version: Version
    time_s: float
    seconds: float
    reward_mean: float
    responses: int
    failed: int
    length_mean: float


EvalWatcher = Callable[[EvalRecord], object]


class _Answer:
    """One response to one prompt of the set."""

    __slots__ = ("episode", "prompt", "whole")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.episode: Episode | None = None
        self.whole = False

    @property
    def episode_reward(self) -> float:
        return 0.0 if self.episode is None else self.episode.reward


class Evaluator(Listener):
    """Evaluates every `eval_every` versions, and the last one."""

    def __init__(
        self,
        task: Task,
        post: Callable[[Event], None],
        timeout_s: float,
        watch: Sequence[EvalWatcher] = (),
        *,
        clock: Clock,
        workers: WorkerLink,
        samples: SampleSource,
        scorer: Scorer,
        environments: EnvironmentHost,
    ) -> None:
        self._task = task
        self._samples = samples
        self._clock = clock
        self._workers = workers
        self._scorer = scorer
        self._environments = environments
        self._post = post
        self._timeout_s = timeout_s
        self._watch = list(watch)
        self._every = task.settings.eval_every
        self._newest: Version = -1
        self._asked: Version = -1  # for the last time
        self._due: list[Version] = []
        self._version: Version | None = None  # being evaluated
        self._held: Version | None = None  # in the evaluator's engine
        self._began = 0.0
        self._heard_at = 0.0
        self._answers: dict[TrajectoryId, _Answer] = {}
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._failed = 0

    @property
    def busy(self) -> bool:
        return self._version is not None or bool(self._due)

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, ev.WeightsPublished):
            self._newest = event.version
            if self._every is not None and event.version % self._every == 0:
                self._ask_for(event.version)
        if any(isinstance(command, cm.Halt) and command.ok for command in commands):
            self._ask_for(self._newest)

    def _ask_for(self, version: Version) -> None:
        if version > self._asked:
            self._asked = version
            self._due.append(version)
            self._post(ev.VersionPinned(version, _HOLDER))
            self._next()

    def take_over(self, versions: Versions, evaluated: Version, *, halted: bool) -> None:
        """The run is resumed: what was pinned for an evaluation is evaluated anew.

        `evaluated` is the newest version of which there is a record. Versions are evaluated in
        order, so that there is one of all before it; the core has not heard that they are free.
        """
        self._newest, self._asked = versions.newest, evaluated
        pinned = [v for v, record in sorted(versions.live.items()) if _HOLDER in record.pins]
        for version in pinned:
            if version <= evaluated:
                self._post(ev.VersionUnpinned(version, _HOLDER))
            else:
                self._asked = max(self._asked, version)
                self._due.append(version)
        if halted:
            self._ask_for(self._newest)
        self._next()

    def overdue(self, now: float) -> bool:
        """Whether the evaluation has made no progress for so long that it will make none.

        Progress is of responses, their rewards and environments: an evaluator that only sends
        heartbeats makes none.
        """
        return self._version is not None and now > self._heard_at + self._timeout_s

    def lost(self) -> None:
        """The evaluator's process is gone: this evaluation is, and the next has a new one."""
        self._held = None
        if self._version is not None:
            self._failed += len(self._answers) or 1
            for answer in self._answers.values():
                self._discard(answer)
            self._answers.clear()
            self._conclude()

    # One version

    def _next(self) -> None:
        if self._version is not None or not self._due:
            return
        version = self._version = self._due.pop(0)
        self._began = self._heard_at = self._clock.now()
        _log.info("evaluation of version %d begins", version)
        install = cm.Install(EVALUATOR_INSTANCE, 0, version, self._held)
        self._workers.to_evaluator(ms.Perform.of(install))

    def from_evaluator(self, message: ms.FromRollout) -> None:
        """What the evaluator's instance says."""
        if _shows_progress(message):
            self._progressed()
        match message:
            case ms.Reported():
                self._reported(message.event)
            case ms.TurnEnded():
                answer = self._awaited(message.trajectory, message.fence)
                if answer is not None and answer.episode is not None:
                    answer.episode.turn_ended(message)
            case ms.Finished():
                self._finished(message)

    def _progressed(self) -> None:
        self._heard_at = self._clock.now()

    def _reported(self, event: Event) -> None:
        match event:
            case ev.VersionInstalled() if event.version == self._version != self._held:
                self._held = event.version
                self._ask()
            case ev.InstallFailed() if event.version == self._version != self._held:
                self._failed = 1
                self._conclude()
            case ev.TrajectoryFailed() | ev.TrajectoryRefused():
                if self._awaited(event.trajectory, event.fence) is not None:
                    self._give_up(event.trajectory)

    def _awaited(self, number: TrajectoryId, fence: Fence) -> _Answer | None:
        """Whom a message speaks of, unless it is a duplicate."""
        answer = self._answers.get(number)
        if answer is None or answer.whole or fence != self._fence:
            return None
        return answer

    def _ask(self) -> None:
        """Every prompt of the set, as often as it is to be answered."""
        stream = self._task.eval_stream
        assert stream is not None, "checked with the settings"
        samples = self._task.settings.eval_samples
        prompts: list[Prompt] = []
        while found := stream.read(len(prompts), 1024):
            prompts += found
        for number, prompt in enumerate(p for p in prompts for _ in range(samples)):
            self._answers[number] = _Answer(prompt)
        for number, answer in list(self._answers.items()):
            if self._task.has_environment:
                answer.episode = Episode(
                    self._task,
                    self._environments,
                    answer.prompt,
                    _HOLDER,
                    begin=partial(self._begin, number),
                    answer=partial(self._answered, number, answer),
                    fail=partial(self._environment_failed, number),
                )
            else:
                self._begin(number, self._task.encoder.encode(answer.prompt))

    def _begin(self, number: TrajectoryId, tokens: Sequence[int]) -> None:
        assert self._version is not None
        self._progressed()
        episode = self._task.has_environment
        self._workers.to_evaluator(
            ms.Begin(number, self._fence, number, self._version, tuple(tokens), episode)
        )

    @property
    def _fence(self) -> int:
        """One for all placements of a version: none of them ever moves."""
        assert self._version is not None
        return self._version + 1

    def _finished(self, message: ms.Finished) -> None:
        number = message.trajectory.id
        answer = self._awaited(number, message.fence)
        if answer is None:
            return
        answer.whole = True
        self._lengths.append(message.trajectory.num_sampled)
        self._discard(answer)
        if not self._task.rewards:
            self._score(number, answer.episode_reward)
            return
        try:
            trajectory = unpack(self._samples.get(message.trajectory.content))
        except RecordLost as error:
            _log.warning("response %d is lost: %s", number, error)
            self._give_up(number)
            return
        response = self._task.encoder.decode(trajectory.tokens)
        job = self._task.job(answer.prompt, response, trajectory)
        self._scorer.score(job, _HOLDER, partial(self._scored, number, answer))

    def _discard(self, answer: _Answer) -> None:
        if answer.episode is not None:
            answer.episode.discard()

    def _scored(self, number: TrajectoryId, answer: _Answer, outcome: Outcome) -> None:
        if self._answers.get(number) is not answer:
            return  # of an evaluation that was lost
        self._progressed()
        if outcome.failure is not None:
            self._give_up(number)
        else:
            self._score(number, outcome.reward + answer.episode_reward)

    def _environment_failed(self, number: TrajectoryId, failure: str) -> None:
        self._progressed()
        cancel = cm.Cancel(number, self._fence, EVALUATOR_INSTANCE)
        self._workers.to_evaluator(ms.Perform.of(cancel))
        self._give_up(number)

    def _answered(self, number: TrajectoryId, answer: _Answer, reply: EnvReply) -> None:
        assert answer.episode is not None
        self._progressed()
        self._workers.to_evaluator(answer.episode.message(number, self._fence, reply))

    def _give_up(self, number: TrajectoryId) -> None:
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._discard(answer)
            self._failed += 1
            self._when_all_are_in()

    def _score(self, number: TrajectoryId, reward: float) -> None:
        del self._answers[number]
        self._rewards.append(reward)
        self._when_all_are_in()

    def _when_all_are_in(self) -> None:
        if not self._answers:
            self._conclude()

    def _conclude(self) -> None:
        version = self._version
        assert version is not None
        now = self._clock.now()
        record = EvalRecord(
            version=version,
            time_s=now,
            seconds=now - self._began,
            reward_mean=sum(self._rewards) / max(1, len(self._rewards)),
            responses=len(self._rewards),
            failed=self._failed,
            length_mean=sum(self._lengths) / max(1, len(self._lengths)),
        )
        _log.info(
            "evaluation of version %d ended: reward %.3f, %d responses, %d failed, %.2f s",
            version,
            record.reward_mean,
            record.responses,
            record.failed,
            record.seconds,
        )
        for watch in self._watch:
            watch(record)
        self._version, self._failed = None, 0
        self._rewards, self._lengths = [], []
        self._post(ev.VersionUnpinned(version, _HOLDER))
        self._next()


def _shows_progress(message: ms.FromRollout) -> bool:
    """Whether it tells of more than that the evaluator's process lives."""
    event = message.event if isinstance(message, ms.Reported) else None
    heartbeat = isinstance(event, ev.InstanceProgressed) and not event.lengths
    return not heartbeat and not isinstance(message, ms.Used)
