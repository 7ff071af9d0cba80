"""The fault storm: seeded clusters, seeded faults, every promise checked as it runs.

A seed fixes everything: paradigm, sizes, workload, fault rates, draws. On a violation the seed
and the path of its journal are printed; `python -m tests.soak --seed N` does it again, and
`dora-rl replay` and `dora-rl audit` read the journal.

    python -m tests.soak --seeds 1000             # seeds 0 to 999
    python -m tests.soak --seeds 500 --first 9000
    python -m tests.soak --seed 1234              # one, with its faults printed
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import violations
from dora_rl.core.history.journal import JournalWriter
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.errors import DoraError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Elastic, OnFailedMember, ParadigmName, Settings
from dora_rl.simulator.cost_parameters import Efficiency, Model
from dora_rl.simulator.distributions import Constant, LogNormal, Uniform
from dora_rl.simulator.faults import FaultParams
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.workload import Sampler, Workload
from dora_rl.simulator.world import World

MODEL = Model(parameters=1e9, layers=16, heads=16, kv_heads=4, head_dim=64)
CHECK_EVERY = 7  # events; a prime, so that no pattern of events hides between the checks
LIMIT_S = 400_000.0  # of virtual time: a run that needs longer hangs


class Violation(DoraError):
    """A promise was broken under this seed."""


class Storm:
    """One seed's cluster, faults and run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = Random(f"soak/{seed}")
        self.settings = _settings(rng)
        self.params = _params(rng, self.settings)
        self._lend(Random(f"soak/elastic/{seed}"))
        self.workload = _workload(rng)
        self.orchestrator = Orchestrator(self.settings)
        self.audit = Audit(self.settings)
        self.lines: list[str] = []
        self.events = 0

    def _lend(self, rng: Random) -> None:
        """In a share of the seeds; from draws of its own, so that the others stay as they were."""
        if not PARADIGMS[self.settings.paradigm].lends or rng.random() < 0.5:
            return
        self.settings = replace(
            self.settings,
            elastic=rng.choice((Elastic.ROLLOUT, Elastic.BOTH)),
            elastic_gain=rng.choice((1.0, 2.0)),
            switch_estimate_s=rng.choice((0.0, 5.0, 60.0)),
        )
        switch_s = rng.choice((0.0, 1.0, 10.0))
        self.params = self.params.model_copy(
            update={
                "elastic_instances": rng.randint(1, 4),
                "efficiency": self.params.efficiency.model_copy(update={"switch_s": switch_s}),
            }
        )

    def run(self) -> tuple[int, Counter[str]]:
        """Events handled and faults injected; raises on any violation."""
        journal = JournalWriter(self.lines.append, self.settings, {"soak_seed": self.seed})
        world = World(
            self.orchestrator,
            self.params,
            Sampler(self.workload, self.seed),
            self.seed,
            group_size=self.settings.group_size,
        )
        self.world = world
        world.observe(journal.handled)
        world.observe(self.audit.observe)
        world.observe(lambda now, event, commands: self._check())
        outcome = world.run(until_s=LIMIT_S)
        journal.close(outcome.reason)
        self._check(thorough=True)
        if world.halted is None:
            raise Violation(f"no end after {LIMIT_S:.0f} s: {outcome.reason}")
        work = self.orchestrator.state.work
        report = self.audit.report()
        counted = (report.trained, report.filtered, report.failed)
        if counted != (work.trained, work.filtered.total(), work.failed.total()):
            raise Violation(f"the audit counts {counted}, the ledger {work.trained} trained")
        if outcome.ok and report.outstanding:
            raise Violation(f"{report.outstanding} trajectories outstanding after a good end")
        faults = Counter(fault.kind for fault in world.faults.log)
        faults["runs given up"] = not outcome.ok
        lending = self.orchestrator.state.lending
        switches = world.facts.switches
        if lending is not None and not switches <= _most_switches(world, self.settings):
            raise Violation(f"{switches} switches in {world.trainer.steps} steps")
        faults["switches of roles"] = switches
        return self.events, faults

    def _check(self, *, thorough: bool = False) -> None:
        self.events += 1
        if thorough or self.events % CHECK_EVERY == 0:
            breaches = list(violations(self.orchestrator.state))
            if breaches:
                raise Violation("; ".join(breaches))
        if thorough or self.events % (CHECK_EVERY * 50) == 0:
            report = self.audit.report()
            if not report.ok:
                raise Violation("\n".join(report.summary()))


def _most_switches(world: World, settings: Settings) -> int:
    """Two a loan, one loan a step and direction (`policy.lending`)."""
    loans = world.trainer.steps + 1
    instances = world.params.elastic_instances
    if settings.elastic is Elastic.BOTH:
        instances += world.params.instances
    return 2 * loans * instances


def _settings(rng: Random) -> Settings:
    return Settings(
        paradigm=rng.choice([*ParadigmName, ParadigmName.MULTI_VERSION]),
        groups_per_step=rng.randint(1, 8),
        group_size=rng.randint(1, 4),
        max_staleness=rng.randint(0, 4),
        version_slots=rng.choice((1, 1, 2, 3)),
        max_steps=rng.randint(3, 8),
        fill_older=rng.random() < 0.5,
        on_failed_member=rng.choice(list(OnFailedMember)),
        max_retries=rng.randint(0, 4),
        max_losses=rng.randint(1, 10),
        max_train_attempts=20,
        max_publish_attempts=20,
        rebalance_period_s=rng.choice((2.0, 10.0, 30.0)),
        turn_s=rng.choice((20.0, 60.0)),
        heartbeat_timeout_s=rng.choice((25.0, 47.3, 90.0)),
        trajectory_timeout_s=rng.choice((200.0, 600.0)),
        score_timeout_s=60.0,
        install_timeout_s=60.0,
        migration_timeout_s=30.0,
        prompt_timeout_s=40.0,
        train_timeout_s=600.0,
        publish_timeout_s=120.0,
        fleet_timeout_s=20_000.0,
    )


def _params(rng: Random, settings: Settings) -> WorldParams:
    colocated = settings.paradigm in (ParadigmName.SYNC, ParadigmName.PARTIAL)

    def often(most: float) -> float:
        return rng.uniform(0, most) if rng.random() < 0.5 else 0.0

    faults = FaultParams(
        crash_per_hour=often(8),
        hang_per_hour=often(8),
        slow_per_hour=often(8),
        leave_per_hour=often(8),
        rejoin_s=60.0,
        lost=often(0.08),
        duplicated=often(0.2),
        delayed=often(0.3),
        failed_migration=often(0.4),
        failed_kv_path=often(0.4),
        failed_publication=often(0.3),
        failed_install=often(0.2),
        wrong_digest=often(0.05),
        failed_train=often(0.2),
        rejected_batch=often(0.1),
        endless_environment=often(0.02),
        failed_reward=often(0.1),
    )
    return WorldParams(
        instances=rng.randint(1, 7),
        slots=rng.randint(1, 8),
        version_slots=settings.version_slots,
        train_devices=0 if colocated else 2,
        model=MODEL,
        device="A100",
        efficiency=Efficiency(kv_memory_fraction=rng.choice((0.12, 0.3, 0.9))),
        filter_rate=rng.choice((0.0, 0.3)),
        prompts=rng.choice((None, None, rng.randint(1, 40))),
        report_period_s=5.0,
        save_period_s=rng.choice((10.0, 60.0)),
        restart_s=30.0,
        kv_migration=rng.random() < 0.8,
        faults=faults,
    )


def _workload(rng: Random) -> Workload:
    several = rng.random() < 0.3
    return Workload(
        prompt_tokens=Constant(value=200),
        response_tokens=LogNormal(mean=1500, sigma=rng.choice((0.5, 1.2)), max=12_000),
        turns=Uniform(low=1, high=4) if several else Constant(value=1),
        environment_s=Uniform(low=0, high=30) if several else Constant(value=0),
        observation_tokens=Constant(value=50),
        reward_s=Uniform(low=0, high=5),
        group_correlation=rng.choice((0.0, 0.5)),
    )


def storm(seed: int) -> tuple[int, int, Counter[str], str]:
    """One seed: (seed, events, faults, what went wrong)."""
    run = Storm(seed)
    try:
        events, faults = run.run()
    except Exception as error:
        path = Path(tempfile.gettempdir()) / f"dora-rl-soak-{seed}.jsonl"
        path.write_text("".join(run.lines))
        wrong = f"{type(error).__name__}: {error}\n  journal: {path}"
        return seed, run.events, Counter(), wrong
    return seed, events, faults, ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the fault storm over many seeds.")
    parser.add_argument("--seeds", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="this one alone, with its faults printed")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    started = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    broken, events, faults = 0, 0, Counter[str]()
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, (seed, handled, injected, wrong) in enumerate(
            pool.map(storm, seeds, chunksize=4), start=1
        ):
            events += handled
            faults += injected
            if wrong:
                broken += 1
                print(f"seed {seed}: {wrong}", flush=True)
            if done % 500 == 0:
                spent = time.monotonic() - started
                print(f"{done} seeds, {broken} broken, {spent:.0f} s", file=sys.stderr, flush=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in faults.most_common())
    print(
        f"{len(seeds)} seeds from {options.first}: {broken} broken; {events:,} events, "
        f"{faults.total():,} faults ({kinds}) in {time.monotonic() - started:.0f} s"
    )
    return 1 if broken else 0


def _one(seed: int) -> int:
    run = Storm(seed)
    print(run.settings, run.params, run.workload, sep="\n")
    try:
        events, _ = run.run()
    finally:
        for fault in run.world.faults.log[-40:]:
            print(fault)
    print(f"seed {seed}: {events} events, nothing broken; {run.world.halted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
