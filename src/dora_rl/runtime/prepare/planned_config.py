"""A plan of a cluster as the configuration of a run, with a comment on where each value is from.

What the plan found, and what it was told of the run, is set. Model, prompts and reward are those of
the quickstart unless they are known, so that the file is accepted on any machine. What only the
planned cluster has, its devices, is written as options to give there.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import ParadigmName

_QUICKSTART = {
    "prompts": "dora_rl.tasks.chains:row",
    "reward": "dora_rl.tasks.chains:reward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What a plan came to, in figures of the real cluster."""

    command: str
    """That made the plan, and makes it again."""
    model: str | None
    """As `model.path` has it, if it is known."""
    paradigm: ParadigmName
    groups_per_step: int
    group_size: int
    max_staleness: int
    pipeline_depth: int
    slots: int
    version_slots: int
    max_tokens: int
    instances: int
    devices_per_instance: int
    train_devices: int
    """0 where the devices are shared."""
    lora_rank: int | None = None
    gain: float | None = None
    """Over `sync`, by tokens a second."""
    notes: tuple[str, ...] = ()


def planned_config(found: Recommendation) -> str:
    """TOML that `dora-rl check` and `dora-rl train` take."""
    gain = "" if found.gain is None else f" {found.gain:.2f} x sync is what was simulated."
    blocks = [
        "\n".join(
            _comment(
                f"Written by `{found.command}`.{gain} Lines that say `plan` are what it found, "
                "`given` is what it was asked for, `yours` is for you to set."
            )
        ),
        *(_section(name, lines) for name, lines in _sections(found).items()),
        _devices(found),
    ]
    if found.notes:
        told = [line for note in found.notes for line in _comment(note, "# - ", "#   ")]
        blocks.append("\n".join(["# What the plan assumed:", *told]))
    return "\n\n".join(blocks) + "\n"


_Line = tuple[str, Any, str]


def _sections(found: Recommendation) -> dict[str, Sequence[_Line]]:
    model: list[_Line] = [
        ("path", found.model, "given")
        if found.model is not None
        else ("path", "quickstart", "yours: a Hugging Face model directory, or a name on the hub")
    ]
    shared = PARADIGMS[found.paradigm].colocated
    core: list[_Line] = [
        ("paradigm", str(found.paradigm), "plan"),
        ("groups_per_step", found.groups_per_step, "given: prompts of a step"),
        ("group_size", found.group_size, "given: responses to each prompt"),
        ("max_staleness", found.max_staleness, "plan: K"),
    ]
    if found.pipeline_depth:
        core.append(("pipeline_depth", found.pipeline_depth, "plan: groups to keep outstanding"))
    instances = "plan: on all devices, in turns with training" if shared else "plan"
    sections: dict[str, Sequence[_Line]] = {
        "model": model,
        "task": [(key, value, "yours") for key, value in _QUICKSTART.items()],
        "orchestration": core,
        "rollout": [
            ("slots", found.slots, "plan: trajectories at once on an instance"),
            ("version_slots", found.version_slots, "plan: versions that an instance serves"),
            ("max_tokens", found.max_tokens, "given: the longest response"),
        ],
        "runtime": [("instances", found.instances, instances)],
    }
    if found.lora_rank is not None:
        sections["model.lora"] = [("rank", found.lora_rank, "given")]
    return sections


def _devices(found: Recommendation) -> str:
    """What only the planned cluster has, as comments."""
    each, train = found.devices_per_instance, found.train_devices
    keys = [
        ("runtime.kind", "ray"),
        ("runtime.ray.address", "auto"),
        ("rollout.engine", "vllm"),
        ("rollout.device", "cuda"),
        ("rollout.vllm.tensor_parallel_size", each),
        ("runtime.ray.rollout.gpus", each),
    ]
    if train:
        keys += [
            ("runtime.ray.trainer.gpus", train),
            ("train.device", "cuda"),
            ("train.processes", train),
        ]
        words = f"{found.instances} instances of {each} and {train} for training"
    else:
        words = f"{found.instances} instances of {each}, which training shares (lower "
        words += "rollout.vllm.gpu_memory_utilization until both fit)"
    told = _comment(
        f"The devices of the planned cluster: {words}. They are not this machine's to check: on "
        "the cluster, give them with the run (docs/cluster.md):"
    )
    options = " \\\n".join(f"#     --set {key}={value}" for key, value in keys)
    return "\n".join([*told, "#   dora-rl train THIS.toml \\", options])


def _section(name: str, lines: Sequence[_Line]) -> str:
    entries = [(tomli_w.dumps({key: value}).strip(), comment) for key, value, comment in lines]
    width = max(len(entry) for entry, _ in entries)
    return "\n".join([f"[{name}]", *(f"{entry:<{width}}  # {said}" for entry, said in entries)])


def _comment(text: str, first: str = "# ", then: str = "# ") -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=then, break_on_hyphens=False
    )
