"""A real run, under faults at random moments, resumed as often as it ends, then audited."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.config import dump_toml, merged
from dora_rl.core.audit import AuditReport, audit_journal
from dora_rl.core.protocol.errors import UserError
from dora_rl.faultlab.damage import DamagedFiles
from dora_rl.faultlab.driver_process import STOPPED, DriverProcess
from dora_rl.faultlab.faults import FAULTS, Target, available, of_runtime
from dora_rl.faultlab.processes import workers_of_run
from dora_rl.faultlab.ray_nodes import RayNodes
from dora_rl.machine.fast_paths import on_linux
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.launchers.ray.installation import check_installed
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.runtime.records.step_metrics import StepRecord, read_records
from dora_rl.runtime.records.total_steps import steps_trained
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import JOURNAL, LEDGER, METRICS_OF_STEPS, JournalFile, check_free

Progress = Callable[[str], None]
_ENDLESS = 1_000_000  # steps: the storm ends the run
_MOST_FAILURES = 5  # consecutive incarnations
_STOP_S = 300.0  # for the last step and its checkpoint
_STOPS = 3  # incarnations that are stopped, until one exits as it should
_GONE_S = 30.0  # for workers whose driver has ended
_NODES = 3  # of a Ray cluster, beside its head
_FEW = 5  # steps at either end, whose rewards are compared
_STORMY: dict[str, dict[str, Any]] = {
    "orchestration": {"heartbeat_timeout_s": 5.0, "max_losses": 1000},
    "runtime": {"train_silence_s": 8.0},
    # Snapshots so often that most resumes start from one, and some are killed while it is written.
    "run": {
        "steps": _ENDLESS,
        "checkpoint_every": 10,
        "save_every_s": 1.0,
        "snapshot_every": 200,
    },
    "task": {"reward_timeout_s": 2.0},
}


# Two instances and a trainer, wherever there is room; a worker imports torch anew when it is
# replaced, so that the shortest timeouts would be those of a start.
_ON_RAY: dict[str, dict[str, Any]] = {"runtime": {"kind": "ray", "instances": 2}}


@dataclass(frozen=True, slots=True)
class StormSettings:
    """Which run, which faults, how long and how often; refuses what this machine cannot do."""

    config: Mapping[str, Any]
    out: Path
    faults: tuple[str, ...] = tuple(of_runtime("local"))
    minutes: float = 5.0
    every_s: float = 8.0
    seed: int = 0
    runtime: str = "local"

    def __post_init__(self) -> None:
        if not on_linux():
            raise UserError("dora-rl chaos finds the processes of a run in /proc: it needs Linux.")
        for name in self.faults:
            if name not in FAULTS:
                raise UserError(f"no such fault: `{name}`. There are {', '.join(FAULTS)}.")
            if name not in of_runtime(self.runtime):
                raise UserError(
                    f"`{name}` is no fault of --runtime {self.runtime}. There are "
                    f"{', '.join(of_runtime(self.runtime))}."
                )
            if name not in available(self.runtime):
                raise UserError(
                    f"`{name}` needs Linux 5.5 on x86-64 or ARM. Name the others with --faults."
                )
        if not self.faults:
            raise UserError("--faults must name one at least.")
        for option, value in (("minutes", self.minutes), ("every", self.every_s)):
            if not 0 < value < float("inf"):
                raise UserError(f"--{option} must be > 0: `{value}`.")
        if self.runtime == "ray":
            check_installed()
        check_free(self.out)


@dataclass(slots=True)
class StormResult:
    """The faults of a storm, and the state of the run after it."""

    settings: StormSettings
    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    refused: int = 0
    """Resumes that refused a damaged file by its name; it was restored then."""
    steps: int = 0
    states: dict[str, int] = field(default_factory=dict)
    rewards: tuple[float, float] = (0.0, 0.0)
    audit: AuditReport | None = None

    @property
    def ok(self) -> bool:
        return self.audit is not None and self.audit.ok and self.steps > 0

    def to_json(self) -> dict[str, Any]:
        assert self.audit is not None
        return {
            "ok": self.ok,
            "seed": self.settings.seed,
            "minutes": self.settings.minutes,
            "runtime": self.settings.runtime,
            "faults": dict(self.faults),
            "resumed": self.resumed,
            "refused": self.refused,
            "steps": self.steps,
            "trajectories": self.states,
            "reward": {"first": self.rewards[0], "last": self.rewards[1]},
            "audit": self.audit.to_json(),
        }

    def summary(self) -> list[str]:
        assert self.audit is not None
        struck = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        first, last = self.rewards
        return [
            f"{sum(self.faults.values())} faults: {struck}",
            f"{self.steps} steps; resumed {self.resumed} times; refused a damaged file by its name "
            f"{self.refused} times",
            f"trajectories: {states}",
            f"reward {first:.3f} (first {_FEW} steps) -> {last:.3f} (last {_FEW})",
            *self.audit.summary(),
        ]


def run_storm(settings: StormSettings, progress: Progress = lambda _: None) -> StormResult:
    """Train under faults, resume as often as needed, stop, and audit."""
    if settings.runtime == "local":
        return _Storm(settings, progress).run()
    progress(f"starting a Ray cluster of {_NODES} nodes and a head")
    logs = settings.out.with_name(f"{settings.out.name}.ray")
    with RayNodes(logs, _NODES) as nodes:
        return _Storm(settings, progress, nodes).run()


class _Storm:
    def __init__(
        self, settings: StormSettings, progress: Progress, nodes: RayNodes | None = None
    ) -> None:
        self._settings = settings
        self._tell = progress
        self._nodes = nodes
        self._random = random.Random(settings.seed)
        self._result = StormResult(settings)
        self._failures = 0  # consecutive incarnations that failed before they trained a step
        self._log = settings.out.with_name(f"{settings.out.name}.log")
        backups = settings.out.with_name(f"{settings.out.name}.damaged")
        self._damaged = DamagedFiles(settings.out, backups)
        self._driver = self._start()

    def run(self) -> StormResult:
        try:
            self._strike_until_over()
            self._stop()
            self._await_workers_gone()
        finally:
            self._driver.kill(self._settings.out)
        self._check_orphans()
        return self._audited()

    def _strike_until_over(self) -> None:
        end = time.monotonic() + 60 * self._settings.minutes
        strike_at = time.monotonic() + self._pause()
        while time.monotonic() < end:
            time.sleep(0.2)
            self._poll()
            self._tend_nodes()
            if time.monotonic() >= strike_at and self._result.steps:
                strike_at = time.monotonic() + self._pause()
                self._strike()

    def _pause(self) -> float:
        return self._random.expovariate(1 / self._settings.every_s)

    def _strike(self) -> None:
        name = self._random.choice(self._settings.faults)
        target = Target(self._settings.out, self._driver, self._damaged, self._random, self._nodes)
        done = FAULTS[name][0](target)
        if done is not None:
            self._result.faults[name] += 1
            number = sum(self._result.faults.values())
            self._tell(f"fault {number}, step {self._result.steps}: {done}")

    # Nodes, on Ray

    def _tend_nodes(self) -> None:
        done = None if self._nodes is None else self._nodes.tend()
        if done is not None:
            self._tell(done)

    def _check_orphans(self) -> None:
        """What has outlived its node, which no audit would find."""
        left = [] if self._nodes is None else self._nodes.await_gone()
        if left:
            raise RunFailed(f"processes have outlived their nodes: {'; '.join(left)}")

    def _await_workers_gone(self) -> None:
        """A run that was stopped leaves no worker behind, on whatever node."""
        deadline = time.monotonic() + _GONE_S
        while left := workers_of_run(self._settings.out):
            if time.monotonic() > deadline:
                raise RunFailed(f"workers have outlived the run: {left}")
            time.sleep(0.1)

    # Incarnations of the driver

    def _start(self) -> DriverProcess:
        settings = self._settings
        runtime = {} if self._nodes is None else _ON_RAY
        data = merged(settings.config, _STORMY, runtime, {"run": {"out": str(settings.out)}})
        config = settings.out.with_name(f"{settings.out.name}.toml")
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(dump_toml(read_config(data)), encoding="utf-8")
        return self._launch(str(config))

    def _launch(self, *arguments: str) -> DriverProcess:
        self._damaged.incarnation_started()
        environment = {} if self._nodes is None else self._nodes.environment
        return DriverProcess(
            ["train", *arguments, "--plain"], self._log, self._settings.seed, environment
        )

    def _poll(self) -> None:
        """Read how far the run is, and resume it if its driver has exited."""
        if self._driver.ended:
            self._check_exit()
            if not (self._settings.out / LEDGER).is_file():
                raise RunFailed(f"the run ended before it wrote its ledger: see {self._log}")
            self._driver.close()
            self._result.resumed += 1
            self._driver = self._launch("--resume", str(self._settings.out))
            return
        if self._damaged.remaining and not self._driver.has_trained:
            return  # what we would read may be damaged
        steps = self._steps()
        if steps > self._result.steps:
            self._result.steps = steps
            self._failures = 0
            self._damaged.survived()

    def _check_exit(self) -> None:
        """A driver that failed must name the damaged file, which is then restored."""
        if not self._driver.failed:
            return
        named = self._damaged.restore_named(
            self._driver.error_message, as_input=self._driver.refused_input
        )
        if named:
            self._result.refused += 1
            self._tell(f"refused, and restored: {', '.join(path.name for path in named)}")
            return
        self._failures += 1
        if self._failures > _MOST_FAILURES:
            damaged = ", ".join(str(file.path) for file in self._damaged.remaining)
            why = f", and did not say that {damaged} is damaged" if damaged else ""
            raise RunFailed(
                f"the run ended {self._failures} times without a step{why}: see {self._log}"
            )

    def _steps(self) -> int:
        """Steps that are trained and committed."""
        if not (self._settings.out / LEDGER).is_file():
            return 0
        with Ledger.read(self._settings.out / LEDGER) as ledger:
            return max(self._result.steps, steps_trained(ledger))

    def _stop(self) -> None:
        """The storm is over: one more step is trained, then the run is stopped and saves."""
        self._tell("the storm is over: training one more step, then stopping")
        self._driver.disk.be_healthy()
        code = STOPPED
        for _ in range(_STOPS):
            self._await_step()
            code = self._driver.stop(_STOP_S)
            if code == STOPPED:
                return
            self._poll()  # the storm may have hit it before; the next one must exit well
        raise RunFailed(
            f"the run was stopped {_STOPS} times, and exited with code `{code}` instead of "
            f"{STOPPED}: see {self._log}"
        )

    def _await_step(self) -> None:
        deadline = time.monotonic() + _STOP_S
        before = self._result.steps
        while self._result.steps <= before:
            self._poll()
            self._tend_nodes()
            if time.monotonic() > deadline:
                raise RunFailed(f"no step was trained after the storm: see {self._log}")
            time.sleep(0.2)

    def _audited(self) -> StormResult:
        result, out = self._result, self._settings.out
        result.audit = audit = audit_journal(JournalFile(out.name, out / JOURNAL).lines())
        result.states = {
            "trained": audit.trained,
            "filtered": audit.filtered,
            "failed": audit.failed,
            "outstanding": audit.outstanding,
        }
        with Ledger.read(out / LEDGER) as ledger:
            result.steps = steps_trained(ledger)
        records = read_records(out / METRICS_OF_STEPS)
        rewards = [record.reward_mean for record in records if isinstance(record, StepRecord)]
        if rewards:
            result.rewards = statistics.fmean(rewards[:_FEW]), statistics.fmean(rewards[-_FEW:])
        return result
