"""Devices that change roles in virtual time: when it pays, and when it does not; never a thrash."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import check
from dora_rl.core.history.journal import JournalWriter
from dora_rl.core.history.replay import replay
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol.settings import Elastic, Settings
from dora_rl.simulator.cost_parameters import Efficiency, Model
from dora_rl.simulator.distributions import Constant, LogNormal
from dora_rl.simulator.faults import FaultParams
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.workload import Sampler, Workload
from dora_rl.simulator.world import World

MODEL = Model(parameters=7e9, layers=28, heads=28, kv_heads=4, head_dim=128)


class Run:
    """One run: `train_overhead_s` decides which role waits for the other."""

    def __init__(
        self,
        elastic: Elastic,
        *,
        train_overhead_s: float = 5.0,
        train_tokens_cost: float = 1.0,
        switch_s: float = 1.0,
        steps: int = 8,
        seed: int = 0,
        sigma: float = 1.0,
        gain: float = 2.0,
        faults: FaultParams | None = None,
    ) -> None:
        self.settings = Settings(
            groups_per_step=8,
            group_size=4,
            max_steps=steps,
            elastic=elastic,
            elastic_gain=gain,
            switch_estimate_s=switch_s,
            heartbeat_timeout_s=400.0,
        )
        params = WorldParams(
            instances=2,
            elastic_instances=0 if elastic is Elastic.OFF else 2,
            slots=8,
            train_devices=2,
            model=MODEL,
            device="A100",
            efficiency=Efficiency(
                switch_s=switch_s,
                train_overhead_s=train_overhead_s,
                train_efficiency=0.35 / train_tokens_cost,
            ),
            faults=faults or FaultParams(),
        )
        workload = Workload(
            prompt_tokens=Constant(value=200),
            response_tokens=LogNormal(mean=1500, sigma=sigma, max=12_000),
        )
        self.core = Orchestrator(self.settings)
        self.lines: list[str] = []
        journal = JournalWriter(self.lines.append, self.settings, {})
        audit = Audit(self.settings)
        self.world = World(self.core, params, Sampler(workload, seed), seed, group_size=4)
        self.world.observe(journal.handled)
        self.world.observe(audit.observe)
        self.world.observe(lambda now, event, commands: check(self.core.state))
        self.outcome = self.world.run(until_s=1e6)
        journal.close(self.outcome.reason)
        assert self.outcome.ok, self.outcome
        self.audit = audit.report()
        assert self.audit.ok, self.audit.summary()

    @property
    def seconds(self) -> float:
        return self.outcome.now

    @property
    def loans(self) -> tuple[int, int]:
        counters = self.core.state.counters
        return counters["loans_to_rollout"], counters["loans_to_training"]


def test_a_trainer_that_waits_lends_and_the_run_is_sooner_over() -> None:
    off, on = Run(Elastic.OFF), Run(Elastic.ROLLOUT)
    assert off.world.facts.switches == 0
    assert on.loans[0] >= 4 and on.loans[1] == 0
    assert on.seconds < 0.9 * off.seconds
    assert on.audit.trained == off.audit.trained and not on.audit.outstanding


def test_rollout_that_is_ahead_lends_and_the_run_is_sooner_over() -> None:
    slow = {"train_tokens_cost": 16.0}
    off, on = Run(Elastic.OFF, **slow), Run(Elastic.BOTH, **slow)
    assert on.loans[1] >= 3
    assert on.seconds < 0.95 * off.seconds
    assert on.audit.trained == off.audit.trained


def test_where_switching_takes_longer_than_the_wait_nobody_switches() -> None:
    off = Run(Elastic.OFF)
    longest_wait_s = off.seconds / off.world.trainer.steps
    on = Run(Elastic.BOTH, switch_s=longest_wait_s)
    assert on.loans == (0, 0)
    assert on.world.facts.switches == 0
    assert on.seconds == pytest.approx(off.seconds)  # asleep, they change nothing


def test_what_moves_to_lent_devices_is_moved_back_or_parked_and_replays_to_the_byte() -> None:
    on = Run(Elastic.ROLLOUT)
    assert on.world.facts.parked > 0 or on.world.facts.migrated > 0
    report = replay(iter([f"{line}\n" if line[-1] != "\n" else line for line in on.lines]))
    assert report.ok, report.summary()
    commands = [c for line in on.lines[1:-1] for c in json.loads(line)[2]]
    assert sum(c[0] == "Wake" for c in commands) == sum(c[0] == "Sleep" for c in commands)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    elastic=st.sampled_from((Elastic.ROLLOUT, Elastic.BOTH)),
    gain=st.sampled_from((1.0, 2.0)),
    sigma=st.floats(0.3, 1.5),
    switch_s=st.floats(0.0, 30.0),
    train_overhead_s=st.floats(0.0, 60.0),
    slow=st.floats(0.0, 60.0),
)
def test_noise_makes_no_thrash(
    seed: int,
    elastic: Elastic,
    gain: float,
    sigma: float,
    switch_s: float,
    train_overhead_s: float,
    slow: float,
) -> None:
    """Lengths, instances that slow down by chance, switches: two switches a loan, a loan a step."""
    faults = FaultParams(slow_per_hour=slow, slow_s=60.0)
    run = Run(
        elastic,
        seed=seed,
        gain=gain,
        sigma=sigma,
        switch_s=switch_s,
        train_overhead_s=train_overhead_s,
        faults=faults,
        steps=5,
    )
    most = run.world.trainer.steps + 1
    to_rollout, to_training = run.loans
    assert to_rollout <= most and to_training <= most
    assert run.world.facts.switches <= 2 * 2 * (to_rollout + to_training)


def test_training_on_lent_devices_is_refused_by_the_world() -> None:
    run = Run(Elastic.ROLLOUT, steps=2)
    trainer, lent = run.world.trainer, run.world.instances[-1]
    lent.set_asleep(False)
    with pytest.raises(Exception, match=f"instance {lent.id} is awake"):
        trainer.train(cm.Train(trainer.steps, ()))
