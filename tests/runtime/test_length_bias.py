"""A run in processes, killed again and again, trains what it would have trained without.

With a learning rate of 0 every version is the same model, and a response follows from the seed
and its name alone: what a run in one process trained, undisturbed, says how long each must be.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.history.journal import Record
from dora_rl.core.protocol.commands import Score, Start
from dora_rl.core.protocol.events import (
    InstanceFailed,
    InstanceProgressed,
    InstanceStopped,
    TrajectoryFinished,
)
from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.faultlab.processes import workers_of_run
from dora_rl.runtime.execution import execute
from dora_rl.runtime.prepare.plan import plan_resume
from dora_rl.runtime.records.ledger_writer import saved_prefixes
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER
from tests.models.random_models import make_model, make_tokenizer
from tests.patience import PATIENCE_S
from tests.runtime.harness import PROMPTS, Seen, accepted, assert_sound, records, run, trained

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
LIVES = 4  # in each of which a rollout process is killed, and then the driver
VOCABULARY = 300
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"learning_rate": 0.0},
    "rollout": {"slots": 3, "max_tokens": 1000, "stop": ["q"], "deterministic": True},
    "orchestration": {"groups_per_step": 2, "group_size": 3},
    "run": {"steps": 6, "save_every_s": 0.05, "commit_every_s": 0.05},
}
LOCAL = {**SECTIONS, "runtime": {"kind": "local", "report_period_s": 0.1}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose responses may be long."""
    directory = tmp_path_factory.mktemp("roomy")
    more: dict[str, Any] = {"max_position_embeddings": 2048, "eos_token_id": 0, "bos_token_id": 0}
    make_model(directory, "llama", seed=1, vocab_size=VOCABULARY, **more)
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory


class Life:
    """One life of the driver, in a process of its own."""

    def __init__(self, model: Path, out: Path) -> None:
        self.out = out
        sections = "resume" if self.records else json.dumps(LOCAL)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.harness", str(model), str(out), sections],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def records(self) -> int:
        """Of the journal, and on the disk for good."""
        if not (self.out / LEDGER).is_file():
            return 0
        with Ledger.read(self.out / LEDGER) as ledger:
            return ledger.position.records

    @property
    def written(self) -> int:
        """Tokens that survive a death."""
        with Ledger.read(self.out / LEDGER) as ledger:
            saved = sum(prefix.num_tokens for prefix in saved_prefixes(ledger).values())
        whole = (
            record.event.tokens
            for record in records(self.out)
            if isinstance(record.event, TrajectoryFinished)
        )
        return saved + sum(whole)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.05)

    def rollout(self) -> int | None:
        """The process that generates, if it is there."""
        return workers_of_run(self.out).get("rollout-0")

    def strike(self, rng: random.Random, *, twice: bool) -> None:
        """Kill the rollout process, and then the driver; with `twice`, its successor with it."""
        self.wait_for(lambda: self.rollout() and self.records)
        self._wait_for_tokens(rng.randint(100, 500))
        pid = self.rollout()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if twice:
            self._wait_for_tokens(rng.randint(100, 300))
        else:
            time.sleep(rng.random())
        self.end()

    def _wait_for_tokens(self, more: int) -> None:
        before = self.written
        self.wait_for(lambda: self.written >= before + more)

    def end(self) -> None:
        if self._process.poll() is None:
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.communicate()
            assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]


class Progress:
    """What the journal tells of starts: from where each trajectory went on."""

    def __init__(self, found: list[Record]) -> None:
        self.lengths: dict[TrajectoryId, int] = {}  # of what is whole
        self.known = self.kept = 0  # tokens, of those who began again: written, and not lost
        self.continued: Counter[type] = Counter()  # starts after a prefix, by what came before
        self._starts: dict[TrajectoryId, Start] = {}  # the last of each
        self._written: dict[TrajectoryId, int] = {}
        self._saved: dict[TrajectoryId, int] = {}
        cause: type | None = None
        for record in found:
            if isinstance(record.event, InstanceFailed | InstanceStopped):
                cause = type(record.event)
            if isinstance(record.event, InstanceProgressed):
                self._progressed(record.event)
            for command in record.commands:
                if isinstance(command, Start):
                    self._start(command, cause)
                if isinstance(command, Score) and isinstance(record.event, TrajectoryFinished):
                    self.lengths[command.trajectory] = record.event.tokens

    def _progressed(self, event: InstanceProgressed) -> None:
        for told, into in ((event.lengths, self._written), (event.saved, self._saved)):
            for name, fence, tokens in told:
                start = self._starts.get(name)
                if start is not None and start.fence == fence:
                    assert tokens >= start.prefix_tokens, "it began anew, whatever was asked"
                    into[name] = max(tokens, into.get(name, 0))

    def _start(self, start: Start, cause: type | None) -> None:
        name = start.trajectory
        assert name not in self.lengths, "it was whole, and is generated again"
        assert start.prefix_tokens == self._saved.get(name, 0), "it had saved something else"
        self._starts[name] = start
        self.known += self._written.get(name, 0)
        self.kept += start.prefix_tokens
        if start.prefix_tokens and cause is not None:
            self.continued[cause] += 1


def test_killed_again_and_again_it_trains_the_same_lengths(roomy: Path, tmp_path: Path) -> None:
    whole = Seen(tmp_path / "whole")
    reference = run(roomy, tmp_path / "whole", whole, **SECTIONS)
    assert_sound(reference)
    texts = {sample.trajectory.id: sample.trajectory.tokens for sample in whole.samples}
    lengths = {name: len(tokens) for name, tokens in texts.items()}
    assert max(lengths.values()) > 3 * sum(lengths.values()) / len(lengths)

    out, rng = tmp_path / "run", random.Random(7)
    complete: list[tuple[int, set[int]]] = []  # at each death: records so far, and who was whole
    for number in range(LIVES):
        life = Life(roomy, out)
        try:
            life.strike(rng, twice=number % 2 == 0)
        finally:
            life.end()
        complete.append((life.records, accepted(out)))
    last = Seen(out)
    ended = execute(plan_resume(out, prompts=PROMPTS), listeners=[last])
    assert_sound(ended)

    found = records(out)
    assert ended.audit.issued == ended.audit.trained == len(lengths)
    assert not ended.audit.lengths.warning
    progress = Progress(found)
    assert {name: progress.lengths[name] for _, _, name in trained(out)} == lengths
    for sample in last.samples:
        assert sample.trajectory.tokens == texts[sample.trajectory.id]
    for position, names in complete:
        again = [c for r in found[position:] for c in r.commands if isinstance(c, Start)]
        assert not names.intersection(start.trajectory for start in again), "generated twice"
    assert progress.continued[InstanceFailed] and progress.continued[InstanceStopped]
    assert progress.kept > 0.5 * progress.known, "much was written again"
