"""The trainer and the store of weights: train steps, publications, deletions.

Invariants, checked: steps are taken in order, once each; a group is trained at most once, on
whole and scored trajectories; a version is published after the step that makes it, all or
nothing; a version that a live instance holds is not deleted. A colocated trainer takes the
devices of all instances from the switch before a step to the switch after it.
"""

from collections.abc import Callable, Iterable, Sequence

from dora_rl.core.protocol.commands import Delete, Publish, Train
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    Event,
    PublicationFailed,
    WeightsPublished,
)
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.instance import Instance
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.runs import SCORED, Job
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.usage import Span

NO_NUMBER = "loss is not finite"


def digest_of(version: int) -> str:
    """The digest of a version's true weights."""
    return f"v{version}"


class Store:
    """The versions whose weights can be read."""

    def __init__(self) -> None:
        self.versions = {0}
        self.deleted: set[int] = set()

    def delete(self, command: Delete, instances: Iterable[Instance]) -> None:
        """Free a version. The core must know that no instance holds it."""
        for instance in instances:
            if instance.holds(command.version) and instance.expelled < instance.incarnation:
                raise WorldError(f"{command}, but instance {instance.id} holds it")
        self.versions.discard(command.version)
        self.deleted.add(command.version)


class Trainer:
    """Performs `Train` and `Publish`, one at a time each."""

    def __init__(
        self,
        around: Surroundings,
        params: WorldParams,
        group_size: int,
        jobs: dict[int, Job],
        store: Store,
        faults: Faults,
        report: Callable[[Event], None],
        take_devices: Callable[[bool], None],
        instances: Sequence[Instance],
    ) -> None:
        """Devices of those of `instances` that sleep are the trainer's."""
        self._around = around
        self._clock = around.clock
        self._params = params
        self._take_devices = take_devices
        self._instances = instances
        self._group_size = group_size
        self._jobs = jobs
        self._store = store
        self._faults = faults
        self._report = report
        self._trained_groups: set[int] = set()
        self._rejected: set[tuple[int, ...]] = set()  # batches that no loss came of
        self._busy: Train | None = None
        self._publishing: int | None = None
        self._plan = 0  # the number of the end of the step that is valid
        self._ends_at = 0.0
        self._scales = 1.0  # the share of a step's time that shrinks with more devices
        self._devices = params.train_devices or params.devices
        self.steps = 0  # taken so far; the weights in the trainer are this version

    def train(self, command: Train) -> None:
        if command.step < self.steps:
            self._report(BatchTrained(command.step))
            return
        groups = tuple(entry.group for entry in command.groups)
        if groups in self._rejected:
            self._report(BatchRejected(command.step, groups, NO_NUMBER))
            return
        if self._busy is not None:
            if self._busy.step != command.step:
                raise WorldError(
                    f"train step {command.step} is asked for during step {self._busy.step}"
                )
            return
        if command.step > self.steps:
            raise WorldError(f"train step {command.step} is asked for at step {self.steps}")
        for instance in self._instances:
            if instance.elastic and _has_devices(instance):
                raise WorldError(f"{command.step} is trained, but instance {instance.id} is awake")
        tokens, pairs = self._weigh(command)
        costs, params = self._around.costs, self._params
        self._devices = devices = self._count_devices()
        duration_s = costs.train_time(tokens, devices, params.updates_per_step, pairs)
        fixed_s = costs.train_time(0, devices, params.updates_per_step)
        self._scales = 1 - fixed_s / duration_s if duration_s else 0.0
        if params.colocated:
            duration_s += costs.switch_time()
            self._take_devices(True)
        self._busy = command
        self._end_after(duration_s, (command, self._clock.now, tokens))

    def _end_after(self, seconds: float, argument: tuple[Train, float, int]) -> None:
        self._plan += 1
        self._ends_at = self._clock.now + seconds
        self._argument = argument
        self._clock.after(seconds, self._ended, self._plan)

    def _ended(self, plan: int) -> None:
        if plan == self._plan:
            self._trained(self._argument)

    def _count_devices(self) -> int:
        """Its own, and those of rollout's instances that sleep."""
        params = self._params
        own = params.train_devices or params.devices
        helping = sum(i.alive and i.asleep and not i.elastic for i in self._instances)
        return own + helping * params.devices_per_instance

    def devices_changed(self) -> None:
        """More or fewer instances sleep: the rest of a step that is being taken scales."""
        before, self._devices = self._devices, self._count_devices()
        if self._busy is not None and self._devices != before:
            left_s = self._ends_at - self._clock.now
            left_s *= 1 - self._scales + self._scales * before / self._devices
            self._end_after(left_s, self._argument)

    def _weigh(self, command: Train) -> tuple[int, float]:
        """Tokens of a batch, and pairs of tokens that attend to each other."""
        tokens, pairs = 0, 0.0
        for group in command.groups:
            if group.group in self._trained_groups:
                raise WorldError(f"group {group.group} is trained twice, again in {command.step}")
            for trajectory_id in group.trajectories:
                job = self._jobs.get(trajectory_id)
                if job is None or not job.whole or job.scoring != SCORED:
                    raise WorldError(
                        f"trajectory {trajectory_id} is trained, but it is not whole or scored"
                    )
                total = job.total
                tokens += total
                pairs += 0.5 * total * (total + 1)
        return tokens, pairs

    def _trained(self, argument: tuple[Train, float, int]) -> None:
        command, start, tokens = argument
        step, now = command.step, self._clock.now
        self._busy = None
        switch_s = self._around.costs.switch_time() if self._params.colocated else 0.0
        self._around.facts.switch_s += switch_s  # the one before the step
        self._around.facts.train_s += now - start - switch_s
        if self._params.colocated:
            self._clock.after(switch_s, self._return_devices, switch_s)
        failure = self._faults.params.failed_train
        if self._faults.strikes(now, "failed_train", failure, f"step {step}"):
            self._report(BatchFailed(step, "trainer_failed"))
            return
        rejection = self._faults.params.rejected_batch
        if self._faults.strikes(now, "rejected_batch", rejection, f"step {step}"):
            groups = tuple(entry.group for entry in command.groups)
            self._rejected.add(groups)
            self._report(BatchRejected(step, groups, NO_NUMBER))
            return
        self.steps = step + 1
        for group in command.groups:
            self._trained_groups.add(group.group)
            first = group.group * self._group_size
            for trajectory_id in range(first, first + self._group_size):
                self._jobs.pop(trajectory_id, None)
        self._around.facts.trained_tokens += tokens
        self._span("train", start, step, self._around.facts.train_spans)
        self._report(BatchTrained(step))

    def _return_devices(self, switch_s: float) -> None:
        self._around.facts.switch_s += switch_s
        self._take_devices(False)

    def publish(self, command: Publish) -> None:
        version = command.version
        if version in self._store.versions:
            self._report(WeightsPublished(version, digest_of(version)))
            return
        if version == self._publishing or version in self._store.deleted:
            return
        if version != self.steps or self._publishing is not None or self._busy is not None:
            raise WorldError(
                f"version {version} is published at step {self.steps}"
                f"{' while another one is' if self._publishing is not None else ''}"
                f"{' during training' if self._busy is not None else ''}"
            )
        self._publishing = version
        duration_s = self._around.costs.publish_time(
            self._params.train_devices or self._params.devices
        )
        self._clock.after(duration_s, self._published, (version, self._clock.now))

    def _published(self, argument: tuple[int, float]) -> None:
        version, start = argument
        self._publishing = None
        now, failure = self._clock.now, self._faults.params.failed_publication
        self._around.facts.publish_s += now - start
        if self._faults.strikes(now, "failed_publication", failure, f"version {version}"):
            self._report(PublicationFailed(version, "store_failed"))
            return
        self._store.versions.add(version)
        self._span("publish", start, version, self._around.facts.publish_spans)
        self._report(WeightsPublished(version, digest_of(version)))

    def _span(self, kind: str, start: float, version: int, spans: list[Span]) -> None:
        span = Span(kind, None, start, self._clock.now, version)
        spans.append(span)
        if self._around.recorder is not None:
            self._around.recorder.span(span)


def _has_devices(instance: Instance) -> bool:
    """Awake, or on its way to or from that, unless the core has disowned the process."""
    awake = instance.alive and (not instance.asleep or instance.switching)
    return awake and instance.expelled < instance.incarnation
