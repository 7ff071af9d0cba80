"""What is planned: a scenario file, flags, or both, as one checked scenario.

Nothing is left to guess silently: whatever was derived or assumed is in the notes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.config import apply_overrides, validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.costs import Costs
from dora_rl.simulator.distributions import LogNormal
from dora_rl.simulator.planning.bounds import Bounds, Lengths
from dora_rl.simulator.planning.reduction import with_efficiency
from dora_rl.simulator.planning.shapes import devices_per_instance, model_named, slots_of
from dora_rl.simulator.scenarios import Scenario, foreign_constants, load_scenario
from dora_rl.simulator.workload import Workload

SOURCE = "the command line"
# What the plan finds; a value given for them would be ignored.
_SEARCHED = {
    "cluster.train_devices": "The plan finds it.",
    "orchestration.pipeline_depth": "The plan finds it.",
    "rollout.version_slots": "The plan finds it.",
    "orchestration.max_staleness": "Use --max-staleness-limit.",
    "orchestration.paradigm": "The plan finds it.",
}
# Without a scenario: the default workload's lengths, which the notes say.
_BASE: dict[str, Any] = {
    "scenario": {"title": "planned", "warmup_steps": 3},
    "run": {"steps": 8},
    "orchestration": {"max_staleness": 4},
    "cluster": {"device": "H100", "train_devices": 1},
    "workload": {"group_correlation": 0.3},
}


@dataclass(frozen=True, slots=True)
class Question:
    """What the user said; None is not said."""

    scenario: str | None = None
    overrides: tuple[str, ...] = ()
    devices: int | None = None
    device: str | None = None
    model: str | None = None
    devices_per_instance: int | None = None
    batch: tuple[int, int] | None = None
    """Prompts in a step, and responses to each."""
    mean_length: float | None = None
    max_length: float | None = None
    length_sigma: float | None = None
    """0 for constant lengths."""
    lengths: Path | None = None
    train_step_minutes: float | None = None
    """A measured train step on all devices."""
    seed: int | None = None

    @property
    def describes_cluster(self) -> bool:
        """Whether anything but a scenario says what to plan."""
        return self.model is not None or self.devices is not None

    @property
    def speaks_of_lengths(self) -> bool:
        """Whether a flag changes the lengths of responses."""
        said = (self.mean_length, self.max_length, self.length_sigma, self.lengths)
        return any(value is not None for value in said)


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked scenario, and what was assumed in it."""

    scenario: Scenario
    notes: tuple[str, ...]
    measured: frozenset[str] = frozenset()
    """Keys of `[efficiency]` that the user gave on the command line."""


def pose(question: Question) -> Problem:
    """Make a problem of a question; UserError where it makes no sense."""
    _refuse_searched(question.overrides)
    notes: list[str] = []
    if question.scenario is None and question.describes_cluster:
        scenario = _from_flags(question, notes)
    else:
        name = "default" if question.scenario is None else question.scenario
        scenario = _from_file(name, question, notes)
    if question.train_step_minutes is not None:
        scenario = _calibrated(scenario, question.train_step_minutes, notes)
    return Problem(scenario, tuple(notes), _measured(question))


def _measured(question: Question) -> frozenset[str]:
    """What of `[efficiency]` was said here; a file may hold defaults that somebody wrote out."""
    keys = [override.partition("=")[0].split(".") for override in question.overrides]
    given = {key[-1].strip() for key in keys if "efficiency" in (part.strip() for part in key)}
    if question.train_step_minutes is not None:
        given.add("update_overhead_s")  # the measured step has it inside
    return frozenset(given)


def _refuse_searched(overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].replace(" ", "")
        if key in _SEARCHED:
            raise UserError(f"{key} is not for --set here: `{override}`. {_SEARCHED[key]}")


def _from_file(name: str, question: Question, notes: list[str]) -> Scenario:
    # Whatever the file says of what is searched, and also if it says nothing.
    searched = ["cluster.train_devices=1", "orchestration.pipeline_depth=0"]
    searched.append("rollout.version_slots=1")
    flags = _flags(question, notes)
    if question.speaks_of_lengths:
        base = load_scenario(name, searched, paradigms=["sync"])
        flags += _lengths(question, base.workload)
    overrides = [*searched, *flags, *question.overrides]
    scenario = load_scenario(name, overrides, paradigms=["sync"], seed=question.seed)
    warning = foreign_constants(name, scenario)
    notes += [] if warning is None else [warning]
    return scenario


def _from_flags(question: Question, notes: list[str]) -> Scenario:
    _refuse_missing(question)
    flags = [*_flags(question, notes), *_lengths(question, Workload()), *question.overrides]
    data = apply_overrides(_BASE, flags)
    if question.seed is not None:
        data["run"]["seed"] = question.seed
    scenario = validate(Scenario, data, SOURCE)
    cluster = data["cluster"]
    if "devices_per_instance" not in cluster:
        count = devices_per_instance(
            scenario.model, scenario.cluster.device, scenario.efficiency, scenario.cluster.devices
        )
        cluster["devices_per_instance"] = count
        notes.append(f"an instance has {count} device(s), so that half its memory is left to KV")
    rollout = data.setdefault("rollout", {})
    if "slots" not in rollout:
        rollout["slots"] = _slots(validate(Scenario, data, SOURCE))
        notes.append(f"an instance has {rollout['slots']} slots, as its KV memory allows")
    scenario = validate(Scenario, data, SOURCE)
    scenario.setup(ParadigmName.SYNC)
    notes += _assumed(question, scenario)
    return scenario


def _refuse_missing(question: Question) -> None:
    """Nobody can guess these: the batch alone may turn a gain of 1.1 into one of 3."""
    needed = {
        "--model": question.model,
        "--devices": question.devices,
        "--batch": question.batch,
    }
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{' and '.join(missing)} {verb} missing. Give a SCENARIO, or --model, --devices and "
            "--batch (prompts in a step x responses to each, such as 512x16)."
        )


def _assumed(question: Question, scenario: Scenario) -> list[str]:
    """What no flag says and the verdict hangs on."""
    notes = []
    lengths = scenario.workload
    if not question.speaks_of_lengths:
        notes.append(
            f"lengths of responses are assumed: {lengths.mean_response_tokens():,.0f} tokens on "
            f"average and {lengths.response_tokens.upper:,.0f} at most; give --lengths, or "
            "--mean-length and --max-length"
        )
    if question.train_step_minutes is None:
        share = scenario.efficiency.train_efficiency
        notes.append(
            f"training is assumed to reach {100 * share:.0f}% of the peak, in "
            f"{scenario.cluster.updates_per_step} update(s) a step; give --train-step-minutes"
        )
    return notes


def _slots(scenario: Scenario) -> int:
    lengths = Lengths.of(scenario.workload, scenario.run.seed, scenario.orchestration.group_size)
    try:
        costs = Costs(
            scenario.model,
            scenario.cluster.device,
            scenario.efficiency,
            devices_per_instance=scenario.cluster.devices_per_instance,
        )
    except ValueError as error:
        raise UserError(f"cluster: {error}") from None
    return slots_of(costs, lengths)


def _flags(question: Question, notes: list[str]) -> list[str]:
    """The flags as overrides, in the words of a scenario."""
    values: dict[str, Any] = {
        "cluster.devices": question.devices,
        "cluster.device": question.device,
        "cluster.devices_per_instance": question.devices_per_instance,
    }
    if question.batch is not None:
        prompts, responses = question.batch
        values["orchestration.groups_per_step"] = prompts
        values["orchestration.group_size"] = responses
    if question.model is not None:
        values["model"], note = model_named(question.model)
        notes += [] if note is None else [note]
    return [f"{key}={_toml(value)}" for key, value in values.items() if value is not None]


def _lengths(question: Question, workload: Workload) -> list[str]:
    """What the flags say of responses, on top of what the workload says."""
    mean, most, sigma = question.mean_length, question.max_length, question.length_sigma
    if question.lengths is not None:
        if mean is not None or sigma is not None:
            raise UserError("--lengths goes without --mean-length and --length-sigma.")
        table: dict[str, Any] = {"kind": "empirical", "path": str(question.lengths)}
        if most is not None:
            table["max"] = most
        return [f"workload.response_tokens={_toml(table)}"]
    if not question.speaks_of_lengths:
        return []
    now = workload.response_tokens
    if not isinstance(now, LogNormal):
        now = LogNormal(mean=2400, sigma=1.0, max=30_000)
    mean = now.mean if mean is None else mean
    if sigma == 0:
        return [f"workload.response_tokens={_toml(mean)}"]
    table = {"kind": "lognormal", "mean": mean, "max": now.max if most is None else most}
    if sigma is None and now.sigma is None:
        table["p99"] = now.p99
    else:
        table["sigma"] = now.sigma if sigma is None else sigma
    return [f"workload.response_tokens={_toml(table)}"]


def _toml(value: Any) -> str:
    """A value as TOML would write it on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _calibrated(scenario: Scenario, minutes: float, notes: list[str]) -> Scenario:
    """The scenario with the train efficiency that a measured step implies."""
    devices, measured_s = scenario.cluster.devices, 60 * minutes
    bounds = Bounds(scenario)
    knobs = scenario.efficiency
    fixed_s = knobs.train_overhead_s + scenario.cluster.updates_per_step * knobs.update_overhead_s
    now_s = bounds.train_s(devices) - bounds.publish_s(devices) - fixed_s
    least_s = fixed_s + now_s * knobs.train_efficiency
    if measured_s < least_s:
        raise UserError(
            f"--train-step-minutes must be >= {least_s / 60:.3g} here, the peak of {devices} "
            f"device(s) and the fixed parts of a step: `{minutes:g}`. Check --batch and the "
            "lengths, or lower efficiency.train_overhead_s."
        )
    efficiency = knobs.train_efficiency * now_s / (measured_s - fixed_s)
    notes.append(
        f"training reaches {100 * efficiency:.0f}% of the peak, as the measured step implies"
    )
    return with_efficiency(scenario, {"train_efficiency": efficiency})
