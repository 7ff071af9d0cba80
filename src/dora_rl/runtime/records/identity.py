"""What a run must not change between its incarnations: its configuration, its task, its model.

Kept in the ledger as plain data, so that a resume can say what differs. What was altered outside
of the configuration (a reward's code, the prompts) can be accepted by its name.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dora_rl.config.redaction import redacted
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.store.rundir import CONFIG
from dora_rl.tasks.fingerprints import UNREADABLE
from dora_rl.tasks.task import Task

ACCEPTABLE = ("prompts", "tokenizer", "reward", "environment", "model")
_SAMPLE = 1 << 16  # bytes of each end of a file: enough to tell two models apart
_ABSENT = "nothing"
_PLACES = {"train": {"device", "processes", "rendezvous", "threads"}, "rollout": {"device"}}


def identity(config: RunConfig, task: Task, model: Path) -> dict[str, Any]:
    """All that a resume compares, as JSON can hold it."""
    return {
        "config": redacted(_what_stays(config)),
        "parts": {**task.fingerprints, "model": _fingerprint(model)},
    }


def _what_stays(config: RunConfig) -> dict[str, Any]:
    """All but where the parts live, where the run is, what is kept of it, and what is only checked.

    A device is where a worker is, and so are an address and the number of processes and threads:
    a checkpoint is continued on any other.

    A prompt that is too long may be found late: to leave it out changes no row before it.
    """
    free: dict[str, Any] = {
        "runtime": True,
        **_PLACES,
        "task": {"dry_run", "long_prompts"},
    }
    sections: dict[str, Any] = config.model_dump(mode="json", exclude=free)
    sections["run"] = {key: sections["run"][key] for key in ("steps", "seed")}
    return sections


def check_same(
    run: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    given: Mapping[str, Any],
    accepted: Collection[str] = (),
) -> None:
    """Refuse to resume as another run, and say in what it would be another one.

    `given` is what its configuration says: a key that is neither there nor in `before` is one that
    an older dora-rl did not know, and is as if it was not there.
    """
    for name in accepted:
        if name not in ACCEPTABLE:
            raise UserError(
                f"cannot be accepted as changed: `{name}`. Name one of {', '.join(ACCEPTABLE)}."
            )
    places = {f"{section}.{key}" for section, keys in _PLACES.items() for key in keys}
    settings = [
        (name, old, new)
        for name, old, new in _differences(before["config"], now["config"], given)
        if not (name == "run.steps" and new > old)  # more of the same
        and name not in places  # which older ledgers have
    ]
    parts = [
        name
        for name, value in now["parts"].items()
        if (before["parts"].get(name) != value or value == UNREADABLE) and name not in accepted
    ]
    if not settings and not parts:
        return
    lines = [f"  {name}: was `{old}`, is `{new}`" for name, old, new in settings]
    lines += [f"  {name}: {_what_happened(now['parts'][name], name)}" for name in parts]
    fixes = []
    if settings:
        fixes.append(f"Put `{run / CONFIG}` back as it was.")
    if parts:
        fixes.append(
            f"Put the {' and the '.join(parts)} back, or accept with "
            f"--accept-changed {','.join(parts)}."
        )
    raise UserError(
        "\n".join([f"`{run}` is not what it was started with:", *lines, " ".join(fixes)])
    )


def _what_happened(fingerprint: str, name: str) -> str:
    if fingerprint == UNREADABLE:
        return f"the code of the {name} cannot be read, and may have changed"
    return f"the {name} changed"


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], given: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in {**before, **now}:
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, given.get(key, {}), f"{place}{key}.")
        elif old != new and (key in before or key in given):
            yield f"{place}{key}", old, new


def _fingerprint(model: Path) -> str:
    """Of the names, sizes and ends of all files; whole files would take long for a large model."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in model.iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
