"""Small runs for tests: a model directory, configurations, and what a run left behind."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dora_rl.core.audit import audit_journal
from dora_rl.core.history.journal import Record, read_journal
from dora_rl.core.history.replay import replay
from dora_rl.core.protocol.commands import Command, Score, Train
from dora_rl.core.protocol.events import BatchTrained, Event
from dora_rl.faultlab.processes import is_forkserver
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.messages import Trained
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.samples import Sample, SampleRef, unpack
from dora_rl.store.rundir import JOURNAL, TRAJECTORIES, JournalFile
from dora_rl.transports.samples.shared_directory import SampleReader

REWARDS = "tests.runtime.rewards"
# What is on the command line of a worker, or of the server that it is a fork of.
WORKERS = {f"dora_rl.runtime.launchers.local.{name}" for name in ("worker", "forkserver")}
RAY, ACTOR = "ray::", "WorkerActor"  # how Ray names processes, and ours
SERVERS = ("from multiprocessing.forkserver import", "from multiprocessing.resource_tracker import")
STARTING = "/ray/_private/workers/"  # of one that has no name yet, and may never get work
ANIMALS = ("fox", "dog", "cat", "hen", "owl", "bee")
PROMPTS = [{"prompt": f"the quick {animal}", "turns": 3} for animal in ANIMALS]


def settings(model: Path, out: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration as TOML has it; the sections are merged into what the tests share.

    The stop strings give responses of all lengths: the model has learnt nothing.
    """
    data: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"reward": f"{REWARDS}:vowels", "reward_workers": 1},
        "train": {"learning_rate": 0.01, "threads": 1},
        "rollout": {"slots": 8, "max_tokens": 24, "stop": ["a", "e", "o", "i"]},
        "orchestration": {"groups_per_step": 2, "group_size": 2, "max_staleness": 2},
        "runtime": {"kind": "inline", "rollout_threads": 1, "train_threads": 1},
        "run": {"steps": 4, "out": str(out)},
    }
    for name, values in sections.items():
        merged = {**data.get(name, {}), **values}
        data[name] = {key: value for key, value in merged.items() if value is not None}
    return data


def run(
    model: Path,
    out: Path,
    /,
    *listeners: Listener,
    prompts: Any = PROMPTS,
    **sections: dict[str, Any],
) -> Run:
    """A whole run."""
    plan = prepare(read_config(settings(model, out, **sections)), prompts=prompts)
    return execute(plan, listeners=listeners)


class Seen(Listener):
    """Keeps all samples that a run was trained on, by step, as its trainer reads them."""

    def __init__(self, out: Path) -> None:
        self.batches: list[Sequence[Sample]] = []
        self._source = SampleReader(out / TRAJECTORIES)

    def trained(self, now: float, report: Trained, samples: Sequence[SampleRef]) -> None:
        records = [self._source.get(sample.trajectory.content) for sample in samples]
        read = zip(samples, records, strict=True)
        self.batches.append([sample.resolve(unpack(record)) for sample, record in read])

    @property
    def samples(self) -> list[Sample]:
        return [sample for batch in self.batches for sample in batch]


def journal(directory: Path) -> JournalFile:
    return JournalFile("run", directory / JOURNAL)


def records(directory: Path) -> list[Record]:
    """What the core was told and answered; refuses a journal that is not whole."""
    entries = list(read_journal(journal(directory).lines()))
    return [entry for entry in entries if isinstance(entry, Record)]


def lines(directory: Path) -> list[str]:
    """The records as text: without the header, which has the settings, and the closing line."""
    return [record.text for record in records(directory)]


def trained(directory: Path) -> list[tuple[int, int, int]]:
    """(step, version, trajectory) of all that was trained on, in order."""
    found: list[tuple[int, int, int]] = []
    asked: Train | None = None
    for record in records(directory):
        if isinstance(record.event, BatchTrained) and record.refused is None:
            assert asked is not None
            found += [(asked.step, g.version, t) for g in asked.groups for t in g.trajectories]
        for command in record.commands:
            asked = command if isinstance(command, Train) else asked
    return found


def accepted(directory: Path) -> set[int]:
    """The trajectories that are whole, as far as the run is committed."""
    commands = (command for record in records(directory) for command in record.commands)
    return {command.trajectory for command in commands if isinstance(command, Score)}


def weights(checkpoint: Path) -> bytes:
    """The policy, or its adapter."""
    (file,) = checkpoint.glob("*model.safetensors")
    return file.read_bytes()


def assert_sound(ended: Run) -> None:
    """What every run keeps that has ended well."""
    assert ended.ending.ok, ended.ending
    assert ended.audit.ok, "\n".join(ended.audit.summary())
    assert audit_journal(journal(ended.directory).lines()).ok
    assert replay(journal(ended.directory).lines()).ok
    assert ended.audit.lost == 0
    ids = [trajectory for _, _, trajectory in trained(ended.directory)]
    assert len(ids) == len(set(ids)) == ended.audit.trained
    assert ended.checkpoint is not None
    from safetensors.torch import load  # late: the driver of a local run has no torch

    tensors = load(weights(ended.checkpoint))
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def children() -> list[psutil.Process]:
    """All processes below this one that still live, but for servers that fork others."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # since it was listed
            command = " ".join(child.cmdline())
            if any(server in command for server in SERVERS):
                continue  # of multiprocessing in the tests themselves, until they end
            if STARTING in command or (command.startswith(RAY) and ACTOR not in command):
                continue  # Ray's own, which end with their cluster
            if child.status() != psutil.STATUS_ZOMBIE and not is_forkserver(child.pid, os.getpid()):
                found.append(child)
    return found


class Waiting(Listener):
    """Waits after a step for an interrupt, or a death: the run is never done before."""

    def __init__(self, step: int) -> None:
        self.step = step

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, BatchTrained) and event.step == self.step:
            while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                time.sleep(0.02)


def main(model: str, out: str, sections: str, wait_after: str = "-1") -> None:
    """A run in a process of its own: `python -m tests.runtime.harness MODEL OUT SECTIONS [STEP]`.

    It goes on where the sections are `resume`. After the step it waits to be struck.
    """
    waiting = Waiting(int(wait_after))
    if sections == "resume":
        ended = execute(plan_resume(out, prompts=PROMPTS), listeners=[waiting])
    else:
        ended = run(Path(model), Path(out), waiting, **json.loads(sections))
    assert "torch" not in sys.modules, "a driver needs none, and it takes seconds to load"
    print(json.dumps({"ok": ended.ok, "interrupted": ended.ending.interrupted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
