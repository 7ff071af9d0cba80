"""What is trained is as long as what was issued, however often instances die.

A system that drops what ran on a dead instance, or lets it begin anew and waits for nobody,
favours short responses: the longer one is, the likelier it is hit. Lengths are drawn before a
run, so what was issued is known without asking the run.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from dora_rl.core.audit import Audit
from dora_rl.core.audit.report import ks_statistic
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command, Score, Start, Train
from dora_rl.core.protocol.events import BatchTrained, Event, TrajectoryFinished
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.protocol.types import GroupId, TrajectoryId, Version
from dora_rl.simulator.cost_parameters import Model
from dora_rl.simulator.distributions import Constant, LogNormal
from dora_rl.simulator.faults import FaultParams
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.workload import Sampler, Workload
from dora_rl.simulator.world import World

GROUP_SIZE = 4
NEVER = 1000  # losses or failures that nobody reaches
LIMIT_S = 50_000.0  # of virtual time: a run that needs longer hangs
MODEL = Model(parameters=1e9, layers=16, heads=16, kv_heads=4, head_dim=64)
LONG_TAILED = Workload(
    prompt_tokens=Constant(value=100),
    response_tokens=LogNormal(mean=600, sigma=1.3, max=9000),
    reward_s=Constant(value=0.1),
)
# An instance lives for 6 s on average; the longest response takes a minute.
DEATHS = FaultParams(crash_per_hour=600)
STORM = FaultParams(
    crash_per_hour=300,
    hang_per_hour=120,
    hang_s=8,
    lost=0.02,
    duplicated=0.1,
    delayed=0.1,
    delay_s=1,
    failed_migration=0.2,
    failed_reward=0.05,
)


class Witness:
    """What was started, finished and trained, from events and commands alone."""

    def __init__(self) -> None:
        self.versions: dict[GroupId, Version] = {}
        self.trained: Counter[int] = Counter()  # by length
        self.trained_groups: set[GroupId] = set()
        self.prefixes: dict[TrajectoryId, int] = {}  # of the last start
        self.shrunk = 0  # starts that continue from less than the one before
        self._lengths: dict[TrajectoryId, int] = {}
        self._batch: Train | None = None

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, BatchTrained) and self._batch and self._batch.step == event.step:
            for group in self._batch.groups:
                self.trained_groups.add(group.group)
                self.trained.update(self._lengths[name] for name in group.trajectories)
            self._batch = None
        for command in commands:
            match command:
                case Start():
                    self.versions[command.trajectory // GROUP_SIZE] = command.version
                    before = self.prefixes.get(command.trajectory, 0)
                    self.shrunk += command.prefix_tokens < before
                    self.prefixes[command.trajectory] = command.prefix_tokens
                case Score() if isinstance(event, TrajectoryFinished):
                    self._lengths[command.trajectory] = event.tokens
                case Train():
                    self._batch = command


class Cluster:
    """Eight instances that die all the time."""

    def __init__(
        self,
        paradigm: ParadigmName,
        faults: FaultParams = DEATHS,
        *,
        max_losses: int = NEVER,
        max_steps: int = 12,
        seed: int = 0,
    ) -> None:
        self.settings = Settings(
            paradigm=paradigm,
            groups_per_step=32,
            group_size=GROUP_SIZE,
            max_staleness=3,
            max_steps=max_steps,
            max_losses=max_losses,
            max_retries=NEVER,
            rebalance_period_s=2.0,
            heartbeat_timeout_s=5.0,
            install_timeout_s=10.0,
            migration_timeout_s=10.0,
            prompt_timeout_s=10.0,
            score_timeout_s=10.0,
            trajectory_timeout_s=40.0,
            train_timeout_s=60.0,
            publish_timeout_s=60.0,
        )
        colocated = paradigm in (ParadigmName.SYNC, ParadigmName.PARTIAL)
        params = WorldParams(
            instances=8,
            slots=16,
            train_devices=0 if colocated else 2,
            model=MODEL,
            device="A100",
            report_period_s=1.0,
            save_period_s=2.0,
            restart_s=1.0,
            faults=faults,
        )
        self.sampler = Sampler(LONG_TAILED, seed)
        self.core = Orchestrator(self.settings)
        self.audit = Audit(self.settings)
        self.witness = Witness()
        self.world = World(self.core, params, self.sampler, seed, group_size=GROUP_SIZE)
        self.world.observe(self.audit.observe)
        self.world.observe(self.witness.observe)

    def run(self, until_steps: int | None = None) -> "Cluster":
        outcome = self.world.run(until_steps=until_steps, until_s=LIMIT_S)
        assert outcome.ok and outcome.now < LIMIT_S, outcome
        report = self.audit.report()
        assert report.ok, "\n".join(report.summary())
        return self

    def lengths_of(self, groups: Sequence[GroupId]) -> Counter[int]:
        """As they were drawn."""
        return Counter(
            self.sampler.trajectory(group, member).generated_tokens
            for group in groups
            for member in range(GROUP_SIZE)
        )

    @property
    def issued(self) -> Counter[int]:
        return self.lengths_of(range(self.core.state.work.issued))

    @property
    def deaths(self) -> int:
        return sum(fault.kind in ("crash", "hang") for fault in self.world.faults.log)


def biased(issued: Counter[int], trained: Counter[int]) -> bool:
    """By Kolmogorov and Smirnov; of unbiased runs, 1 in 100 is found biased."""
    limit = 1.63 * math.sqrt(1 / issued.total() + 1 / trained.total())
    return ks_statistic(issued, trained) > limit


def mean(lengths: Counter[int]) -> float:
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def test_the_lengths_have_a_long_tail() -> None:
    lengths = Cluster(ParadigmName.SYNC).lengths_of(range(12 * 32))
    assert max(lengths) > 10 * mean(lengths)


@pytest.mark.parametrize("faults", [DEATHS, STORM], ids=["deaths", "storm"])
@pytest.mark.parametrize("paradigm", ParadigmName)
def test_what_is_trained_is_as_long_as_what_was_issued(
    paradigm: ParadigmName, faults: FaultParams
) -> None:
    cluster = Cluster(paradigm, faults).run()
    assert cluster.deaths > 100
    assert cluster.issued.total() == 12 * 32 * GROUP_SIZE
    assert cluster.witness.trained == cluster.issued
    # A response of a minute has been through several deaths, and never began anew.
    assert cluster.witness.shrunk == 0
    assert max(cluster.witness.prefixes.values()) > 3000


@pytest.mark.parametrize(
    "paradigm", [ParadigmName.SYNC, ParadigmName.ONE_STEP, ParadigmName.MULTI_VERSION]
)
def test_long_ones_are_not_left_for_later(paradigm: ParadigmName) -> None:
    """In the middle of a run, too: where staleness has a bound, what is due has been trained."""
    steps = 8
    cluster = Cluster(paradigm, max_steps=0).run(until_steps=steps)
    oldest = steps - 1 - cluster.audit.report().max_staleness
    witness = cluster.witness
    due = [group for group, version in witness.versions.items() if version <= oldest]
    assert len(due) >= 32
    assert witness.trained_groups.issuperset(due)
    assert not biased(cluster.lengths_of(range(1000)), cluster.lengths_of(due))


@pytest.mark.parametrize("max_losses", [0, 1])
def test_a_system_that_loses_work_is_found_biased(max_losses: int) -> None:
    """The check has power: to give up what died with an instance, or did so twice, shows."""
    cluster = Cluster(ParadigmName.MULTI_VERSION, max_losses=max_losses).run()
    report = cluster.audit.report()
    assert set(report.failed_for) == {"poison"}
    assert report.never_whole == report.failed_for["poison"]
    assert any(note.startswith("length bias: ") for note in report.notes)
    assert cluster.witness.trained != cluster.issued
    assert biased(cluster.issued, cluster.witness.trained)
    assert mean(cluster.witness.trained) < 0.8 * mean(cluster.issued)
