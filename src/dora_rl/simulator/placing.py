"""Placements on one instance: start, cancel, park, unpark.

Draws a trajectory's shape at every start: a later placement meets the same one, since a draw is
a function of the trajectory, and what nobody runs takes no memory.
A placement happens once: a repeated start of the same fence is void.
"""

from typing import Protocol

from dora_rl.core.protocol.commands import Cancel, Park, Start, Unpark
from dora_rl.core.protocol.events import TrajectoriesParked
from dora_rl.core.protocol.types import Placement
from dora_rl.simulator.hosting import refuse
from dora_rl.simulator.instance import Instance
from dora_rl.simulator.runs import FROZEN, KEPT, PARKED, RUNNING, Job, Run, prefix_segments
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.usage import Span
from dora_rl.simulator.workload import TrajectoryShape


class Shapes(Protocol):
    """Who draws trajectories; `Sampler` is one."""

    def trajectory(self, group: int, member: int, step: int = 0) -> TrajectoryShape:
        """The shape of one member of a group that is started at train step `step`."""


class Placing:
    """Performs `Start`, `Cancel`, `Park` and `Unpark`."""

    def __init__(
        self,
        around: Surroundings,
        shapes: Shapes,
        group_size: int,
        groups_per_step: int | None,
        jobs: dict[int, Job],
        remember: bool,
    ) -> None:
        self._around = around
        self._clock = around.clock
        self._draw = shapes.trajectory
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._jobs = jobs
        self._started: set[int] | None = set() if remember else None

    def start(self, instance: Instance, command: Start) -> None:
        fence, version = command.fence, command.version
        if fence in instance.runs:
            return
        if self._started is not None:
            if fence in self._started:
                return
            self._started.add(fence)
        while version in instance.successors and version not in instance.versions:
            version = instance.successors[version]
        digest = instance.versions.get(version)
        if digest is None or (instance.installing and not instance.serves(version)):
            refuse(instance, f"{command}, but the instance serves {sorted(instance.versions)}")
            return
        trajectory_id = command.trajectory
        group, member = divmod(trajectory_id, self._group_size)
        # Drift follows the group's place in the stream, not when it started: every paradigm
        # meets the same lengths.
        age = 0 if self._groups_per_step is None else group // self._groups_per_step
        prompt_tokens, turns, reward_s = self._draw(group, member, age)
        job = self._jobs.get(trajectory_id)
        if job is None:
            job = self._jobs[trajectory_id] = Job(reward_s)
        run = Run(trajectory_id, fence, group, version, digest, job, prompt_tokens, turns)
        if command.prefix_tokens:
            if command.prefix_tokens > job.saved:
                refuse(instance, f"{command}, but only {job.saved} tokens of it were saved")
                return
            self._resume(run, command.prefix_tokens)
        instance.add(run)

    def _resume(self, run: Run, tokens: int) -> None:
        job = run.job
        run.skip(tokens, prefix_segments(job.saved_segments, tokens))
        self._around.facts.reprefilled_tokens += run.context - run.prompt

    def cancel(self, instance: Instance, command: Cancel) -> None:
        run = instance.runs.get(command.fence)
        if run is not None:
            kept = run.state == KEPT  # its tokens live on elsewhere
            instance.remove(run)
            if not kept:
                self._around.facts.cancelled_tokens += max(0, run.done - run.job.saved)

    def park(self, instance: Instance, command: Park) -> None:
        instance.advance(self._clock.now)
        runs: list[Run] = []
        tokens = 0
        for _, fence in command.placements:
            run = instance.runs.get(fence)
            if run is None or run.state in (FROZEN, KEPT):
                continue
            if run.state == RUNNING:
                instance.leave(run)
            if run.state != PARKED:
                run.state = PARKED
                self._around.facts.parked += 1
            if run.held:
                tokens += run.context - run.debt
            runs.append(run)
        instance.touch()
        duration_s = self._around.costs.park_time(tokens) * instance.slow if tokens else 0.0
        argument = (instance, instance.incarnation, runs, self._clock.now)
        self._clock.after(duration_s, self._parked, argument)

    def _parked(self, argument: tuple[Instance, int, list[Run], float]) -> None:
        instance, incarnation, runs, start = argument
        if not instance.alive or instance.incarnation != incarnation:
            return
        now = self._clock.now
        if instance.frozen_until > now:
            self._clock.at(instance.frozen_until, self._parked, argument)
            return
        parked = []
        for run in runs:
            if run.state == PARKED:
                if run.held:
                    instance.drop(run)
                    run.on_host = True
                parked.append(Placement(run.trajectory, run.fence))
        instance.touch()
        if self._around.recorder is not None and runs:
            span = Span("park", instance.id, start, now, runs[0].version)
            self._around.recorder.span(span)
        instance.emit(TrajectoriesParked(instance.id, incarnation, tuple(parked)))

    def unpark(self, instance: Instance, command: Unpark) -> None:
        for _, fence in command.placements:
            run = instance.runs.get(fence)
            if run is None or run.state != PARKED:
                continue
            if not instance.serves(run.version) and not refuse(
                instance, f"{command}, but the instance does not serve version {run.version}"
            ):
                continue
            instance.go_on(run)
