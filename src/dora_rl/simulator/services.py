"""What is neither an instance nor the trainer: prompts, rewards, judgement.

Answers are functions of what is asked and of the seed, so that a repeated question is answered
alike. Rewards wait in line where the number of workers is limited.
"""

from collections import deque
from collections.abc import Callable

from dora_rl.core.protocol.commands import FetchPrompts, Judge, Score
from dora_rl.core.protocol.events import (
    Event,
    GroupJudged,
    PromptsAvailable,
    TrajectoryFailed,
    TrajectoryScored,
)
from dora_rl.simulator.clock import Clock
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.runs import SCORED, SCORING, UNSCORED, Job

NO_SIGNAL = "no_signal"


class Services:
    """Performs `FetchPrompts`, `Score` and `Judge`."""

    def __init__(
        self,
        clock: Clock,
        params: WorldParams,
        seed: int,
        jobs: dict[int, Job],
        faults: Faults,
        report: Callable[[Event], None],
    ) -> None:
        self._clock = clock
        self._jobs = jobs
        self._faults = faults
        self._report = report
        self._prompts = params.prompts
        self._prompt_s = params.prompt_s
        self._judge_s = params.judge_s
        self._filter_below = int(params.filter_rate * 2**64)
        self._key = _mix(seed + 0x5EED)
        self._workers = params.reward_workers
        self._scoring = 0
        self._line: deque[tuple[int, Job]] = deque()
        self._failed_reward = faults.params.failed_reward
        self._at_once = self._workers is None and not self._failed_reward

    def fetch(self, command: FetchPrompts) -> None:
        self._clock.after(self._prompt_s, self._fetched, command)

    def _fetched(self, command: FetchPrompts) -> None:
        first, count = command.first, command.count
        if self._prompts is None:
            self._report(PromptsAvailable(first, count))
            return
        count = max(0, min(count, self._prompts - first))
        self._report(PromptsAvailable(first, count, first + count >= self._prompts))

    def score(self, command: Score) -> None:
        job = self._jobs.get(command.trajectory)
        if job is None:
            return  # trained or filtered: a late copy of an old question
        if not job.whole:
            raise WorldError(f"{command}, but the trajectory is not whole")
        job.score_fence = max(job.score_fence, command.fence)
        if job.scoring == SCORED:
            self._report(TrajectoryScored(command.trajectory, command.fence))
        elif job.scoring == UNSCORED:
            job.scoring = SCORING
            if self._at_once and not job.reward_s:
                job.scoring = SCORED
                self._report(TrajectoryScored(command.trajectory, command.fence))
            elif self._workers is not None and self._scoring >= self._workers:
                self._line.append((command.trajectory, job))
            else:
                self._scoring += 1
                argument = (command.trajectory, job)
                self._clock.after(job.reward_s, self._scored, argument)

    def _scored(self, argument: tuple[int, Job]) -> None:
        trajectory_id, job = argument
        if self._line:
            waiting = self._line.popleft()
            self._clock.after(waiting[1].reward_s, self._scored, waiting)
        else:
            self._scoring -= 1
        fence = job.score_fence
        if self._failed_reward and self._faults.strikes(
            self._clock.now, "failed_reward", self._failed_reward, f"trajectory {trajectory_id}"
        ):
            job.scoring = UNSCORED
            self._report(TrajectoryFailed(trajectory_id, fence, "reward_failed"))
            return
        job.scoring = SCORED
        self._report(TrajectoryScored(trajectory_id, fence))

    def judge(self, command: Judge) -> None:
        self._clock.after(self._judge_s, self._judged, command)

    def _judged(self, command: Judge) -> None:
        if not self._filter_below or _mix(self._key + command.group) >= self._filter_below:
            self._report(GroupJudged(command.group))
            return
        for trajectory_id in command.trajectories:
            self._jobs.pop(trajectory_id, None)
        self._report(GroupJudged(command.group, NO_SIGNAL))


def _mix(x: int) -> int:
    """Well-mixed 64 bits of a number: two rounds of multiply and shift."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & mask
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & mask
    return x ^ (x >> 32)
