"""The evaluation set, answered by one pinned version at a time, apart from training.

An instance of its own generates; the core knows of it only that it holds a version's weights.
What is found is never trained on, and training never waits for it, but for the last one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from dora_rl.core import commands as cm
from dora_rl.core import events as ev
from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.types import Fence, TrajectoryId, Version
from dora_rl.core.versions import Versions
from dora_rl.runtime import messages as ms
from dora_rl.runtime.listening import Listener
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.task import Task
from dora_rl.tasks.workers.scores import Outcome, ScoreJob
from dora_rl.tasks.workers.sessions import EnvReply

EVALUATOR = 2**20  # its instance number, beyond those of rollout
FIRST_TICKET = 2**62  # of rewards and environments, beyond all fences
_HOLDER = "evaluation"


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


class Outside(Protocol):
    """What a runtime does for evaluation."""

    def now(self) -> float: ...
    def to_evaluator(self, message: ms.ToRollout) -> None: ...
    def score(self, ticket: int, job: ScoreJob) -> None: ...
    def open_episode(self, ticket: int, example: dict[str, object]) -> None: ...
    def step_episode(self, ticket: int, text: str) -> None: ...
    def discard_episode(self, ticket: int) -> None: ...


class _Answer:
    """One response to one prompt of the set."""

    __slots__ = ("begun", "prompt", "reward", "room", "turns", "whole")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.begun = False
        self.reward = 0.0
        self.turns = 0  # that its environment has been told of
        self.whole = False
        self.room = 0


class Examiner(Listener):
    """Evaluates every `eval_every` versions, and the last one."""

    def __init__(
        self,
        task: Task,
        outside: Outside,
        post: Callable[[Event], None],
        timeout_s: float,
        watch: Sequence[EvalWatcher] = (),
    ) -> None:
        self._task = task
        self._outside = outside
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
        self._first = self._unused = FIRST_TICKET  # of this evaluation; of the next
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
        """The run goes on: what was pinned for an evaluation is evaluated anew.

        `evaluated` is the newest version of which there is a record.
        """
        self._newest, self._asked = versions.newest, evaluated
        if halted:
            self._ask_for(self._newest)
        for version, record in sorted(versions.live.items()):
            if _HOLDER in record.pins and version not in self._due:
                self._asked = max(self._asked, version)
                self._due.append(version)
        self._next()

    def overdue(self, now: float) -> bool:
        """Whether nothing has come for so long that nothing will."""
        return self._version is not None and now > self._heard_at + self._timeout_s

    def lost(self) -> None:
        """The evaluator's process is gone: this evaluation is, and the next has a new one."""
        self._held = None
        if self._version is not None:
            self._failed += len(self._answers) or 1
            for number in self._answers:
                self._discard(number)
            self._answers.clear()
            self._conclude()

    # One version

    def _next(self) -> None:
        if self._version is not None or not self._due:
            return
        version = self._version = self._due.pop(0)
        self._began = self._heard_at = self._outside.now()
        install = cm.Install(EVALUATOR, 0, version, self._held)
        self._outside.to_evaluator(ms.Perform.of(install))

    def from_evaluator(self, message: ms.FromRollout) -> None:
        """What the evaluator's instance says."""
        if not isinstance(message, ms.Used):
            self._heard_at = self._outside.now()
        match message:
            case ms.Reported():
                self._reported(message.event)
            case ms.TurnEnded():
                answer = self._awaited(message.trajectory, message.fence)
                if answer is not None and message.turn >= answer.turns:
                    answer.turns, answer.room = message.turn + 1, message.room
                    text = self._task.encoder.decode(message.tokens)
                    self._outside.step_episode(self._first + message.trajectory, text)
            case ms.Finished():
                self._finished(message)

    def _reported(self, event: Event) -> None:
        match event:
            case ev.VersionInstalled() if event.version == self._version != self._held:
                self._held = event.version
                self._ask()
            case ev.InstallFailed() if event.version == self._version != self._held:
                self._failed = 1
                self._conclude()
            case ev.TrajectoryFailed() if self._awaited(event.trajectory, event.fence) is not None:
                self._give_up(event.trajectory)

    def _awaited(self, number: TrajectoryId, fence: Fence) -> _Answer | None:
        """Whom a message speaks of, unless it is said again."""
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
        # No ticket twice: what was asked for an evaluation that was lost is still answered.
        self._first = self._unused
        self._unused += len(self._answers)
        for number, answer in list(self._answers.items()):
            if self._task.has_environment:
                self._outside.open_episode(self._first + number, answer.prompt.example)
            else:
                self._begin(number, self._task.encoder.encode(answer.prompt))

    def _begin(self, number: TrajectoryId, tokens: Sequence[int]) -> None:
        assert self._version is not None
        episode = self._task.has_environment
        self._outside.to_evaluator(
            ms.Begin(number, self._fence, number, self._version, tuple(tokens), episode)
        )

    @property
    def _fence(self) -> int:
        """One for all placements of a version: none of them ever moves."""
        assert self._version is not None
        return self._version + 1

    def _finished(self, message: ms.Finished) -> None:
        number = message.trajectory.trajectory
        answer = self._awaited(number, message.fence)
        if answer is None:
            return
        answer.whole = True
        self._lengths.append(message.trajectory.num_sampled)
        self._discard(number)
        if not self._task.rewards:
            self._score(number, answer.reward)
            return
        response = self._task.encoder.decode(message.trajectory.tokens)
        job = self._task.job(answer.prompt, response, message.trajectory)
        self._outside.score(self._first + number, job)

    def _discard(self, number: TrajectoryId) -> None:
        if self._task.has_environment:
            self._outside.discard_episode(self._first + number)

    def scored(self, outcome: Outcome) -> None:
        """Answers `Outside.score`."""
        number = outcome.ticket - self._first
        answer = self._answers.get(number)
        if answer is None or not answer.whole:
            return
        if outcome.failure is not None:
            self._give_up(number)
        else:
            self._score(number, outcome.reward + answer.reward)

    def answered(self, reply: EnvReply) -> None:
        """Answers `Outside.open_episode` and `Outside.step_episode`."""
        number = reply.ticket - self._first
        answer = self._answers.get(number)
        if answer is None or answer.whole:
            return
        if reply.failure is not None:
            self._outside.to_evaluator(ms.Perform.of(cm.Cancel(number, self._fence, EVALUATOR)))
            self._give_up(number)
            return
        answer.reward += reply.reward
        encoder = self._task.encoder
        if not answer.begun:
            answer.begun = True
            self._begin(number, encoder.encode(answer.prompt, reply.observation))
            return
        tokens: tuple[int, ...] = ()
        if not reply.done and answer.turns < self._task.settings.max_turns:
            tokens = tuple(encoder.observation(str(reply.observation or "")))
        if tokens and len(tokens) < answer.room:
            message: ms.ToRollout = ms.Continue(number, self._fence, answer.turns - 1, tokens)
        else:
            message = ms.Conclude(number, self._fence)
        self._outside.to_evaluator(message)

    def _give_up(self, number: TrajectoryId) -> None:
        if self._answers.pop(number, None) is not None:
            self._discard(number)
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
        now = self._outside.now()
        record = EvalRecord(
            version=version,
            time_s=now,
            seconds=now - self._began,
            reward_mean=sum(self._rewards) / max(1, len(self._rewards)),
            responses=len(self._rewards),
            failed=self._failed,
            length_mean=sum(self._lengths) / max(1, len(self._lengths)),
        )
        for watch in self._watch:
            watch(record)
        self._version, self._failed = None, 0
        self._rewards, self._lengths = [], []
        self._post(ev.VersionUnpinned(version, _HOLDER))
        self._next()
