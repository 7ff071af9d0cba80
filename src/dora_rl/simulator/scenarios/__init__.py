"""Scenarios: TOML files, those that ship beside this module and those that users write.

A name without a suffix is a packaged scenario, anything else a path. Whatever is wrong is
found here, before anything runs or is written.
"""

import difflib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from dora_rl.config import apply_overrides, load_toml, validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.cost_parameters import Efficiency
from dora_rl.simulator.scenarios.model import About, Cluster, Overrides, Scenario, Setup

__all__ = [
    "About",
    "Cluster",
    "Listing",
    "Overrides",
    "Scenario",
    "Setup",
    "foreign_constants",
    "list_scenarios",
    "load_scenario",
    "scenario_names",
]


class Listing(NamedTuple):
    """A packaged scenario as a line of a list."""

    name: str
    title: str
    paradigms: tuple[str, ...]


def scenario_names() -> list[str]:
    """The packaged scenarios, `default` first."""
    names = [
        entry.name.removesuffix(".toml")
        for entry in files(__package__).iterdir()
        if entry.name.endswith(".toml")
    ]
    return sorted(names, key=lambda name: (name != "default", name))


def list_scenarios() -> list[Listing]:
    """What ships, with titles."""
    return [
        Listing(name, about["title"], tuple(about.get("paradigms", ParadigmName)))
        for name in scenario_names()
        for about in [_read(name)[0]["scenario"]]
    ]


def load_scenario(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    paradigms: Sequence[str] | None = None,
    seed: int | None = None,
) -> Scenario:
    """Read a scenario with `a.b=value` overrides, and check it for every paradigm that it runs."""
    data, source = _read(name_or_path)
    data = apply_overrides(data, overrides)
    about = data.setdefault("scenario", {})
    if paradigms is not None and isinstance(about, dict):
        about["paradigms"] = list(paradigms)
    run = data.setdefault("run", {})
    if seed is not None and isinstance(run, dict):
        run["seed"] = seed
    orchestration = data.get("orchestration")
    if isinstance(orchestration, Mapping) and "paradigm" in orchestration:
        raise UserError(
            f"orchestration.paradigm is not for scenarios: `{orchestration['paradigm']}`. "
            "Use scenario.paradigms, or --paradigms."
        )
    scenario = validate(Scenario, data, source)
    for paradigm in scenario.scenario.paradigms:
        scenario.setup(paradigm)
    return scenario


def foreign_constants(name_or_path: str | Path, changed: Scenario) -> str | None:
    """A warning where the scenario's own constants serve another model, device or instance.

    None where nothing of the kind was changed, or the constants are the general ones.
    """
    data, source = _read(name_or_path)
    try:
        own = validate(Scenario, data, source)
    except UserError:  # it says less than a scenario; the rest came from overrides
        return None
    hardware = (changed.cluster.device, changed.cluster.devices_per_instance)
    if (own.model, own.cluster.device, own.cluster.devices_per_instance) == (
        changed.model,
        *hardware,
    ):
        return None
    general, now = dict(Efficiency()), dict(changed.efficiency)
    kept = [key for key, value in own.efficiency if value != general[key] and value == now[key]]
    if not kept:
        return None
    what = "another model or other devices"
    if changed.model.lora_rank is not None and own.model.lora_rank is None:
        what = "LoRA versions instead of full weights"
    return (
        f"constants of `{name_or_path}` are used for {what}, and do not "
        f"transfer: efficiency.{', '.join(kept)}. Give yours by --set"
    )


def _read(name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The plain data of a scenario, and what to call it."""
    name = str(name_or_path)
    if name in scenario_names():
        # Zipped packages have no paths, so the text is read where it is.
        resource = files(__package__) / f"{name}.toml"
        if isinstance(resource, Path):
            return load_toml(resource), name
        import tomllib

        return tomllib.loads(resource.read_text(encoding="utf-8")), name
    path = Path(name)
    if not (path.suffix or "/" in name or path.is_file()):
        known = scenario_names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(
            f"no such scenario: `{name}`.{hint} Known: {', '.join(known)}; or give a TOML file."
        )
    data = load_toml(path)
    _resolve_paths(data.get("workload"), path.parent)
    return data, name


def _resolve_paths(workload: Any, base: Path) -> None:
    """Files of lengths are named relative to the scenario file that names them."""
    if not isinstance(workload, Mapping):
        return
    for distribution in workload.values():
        if isinstance(distribution, dict) and isinstance(distribution.get("path"), str):
            distribution["path"] = str(base / distribution["path"])
