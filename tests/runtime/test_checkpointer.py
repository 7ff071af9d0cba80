"""How a run stops, and what a checkpoint may push out: parts of it, driven by hand."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.protocol.events import WeightsPublished
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.state.run import TrainerPhase
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.records.checkpointer import Checkpointer
from dora_rl.runtime.records.committer import Committer, Flushed
from dora_rl.runtime.records.ledger_writer import LedgerWriter
from dora_rl.store.ledger import Ledger, Position
from dora_rl.store.rundir import LEDGER, checkpoints_in
from dora_rl.store.snapshot_files import SNAPSHOTS
from dora_rl.trainer.settings import Behaviour
from dora_rl.transports.samples.shared_directory import SampleStore
from tests.patience import PATIENCE_S
from tests.runtime.test_history import Told


class Outside:
    """What a run's checkpointer sees of the world: two instances, an idle trainer."""

    def __init__(self, place: Path) -> None:
        self.asked: list[Any] = []
        self.frozen = False
        fleet = SimpleNamespace(instances={0: None, 1: None})
        trainer = SimpleNamespace(phase=TrainerPhase.IDLE)
        versions = SimpleNamespace(newest=3)
        state = SimpleNamespace(fleet=fleet, trainer=trainer, versions=versions)
        run = SimpleNamespace(checkpoint_every=None, durable=True)
        self.files = SimpleNamespace(
            orchestrator=SimpleNamespace(state=state),
            config=SimpleNamespace(run=run),
            checkpoints=place,
        )
        self.halted = None

    def hold(self) -> None: ...

    def freeze(self) -> None:
        self.frozen = True

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        self.asked.append(message)

    def to_trainer(self, message: ms.ToTrainer) -> None:
        self.asked.append(message)

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self, self.files, self)  # type: ignore[arg-type]


def test_a_stop_waits_for_what_it_asked_for(tmp_path: Path) -> None:
    """Instances also say it unasked, every few seconds: that is not their last word."""
    outside = Outside(tmp_path)
    checkpointer = outside.checkpointer()
    unasked, asked = ms.Prefixes((), []), ms.Prefixes((), [], asked=True)
    for instance in (0, 1):
        checkpointer.from_rollout(instance, unasked)
    checkpointer.stop()
    assert outside.asked == [ms.SavePrefixes()]
    for instance in (0, 1):
        checkpointer.from_rollout(instance, unasked)
    checkpointer.from_rollout(0, asked)
    assert not outside.frozen
    checkpointer.from_rollout(1, asked)
    assert outside.frozen
    assert isinstance(outside.asked[-1], ms.Save)


def test_a_save_that_is_asked_for_is_taken_when_the_trainer_is_idle(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    checkpointer, told = outside.checkpointer(), []
    checkpointer.save_soon(lambda: told.append("saved"))
    assert outside.asked == [ms.Save(3)] and not told
    outside.files.committer = SimpleNamespace(checkpointed=lambda step: told.append(step))
    checkpointer.from_trainer(ms.Saved(3))
    checkpointer.from_trainer(ms.Saved(3))
    assert told == [3, "saved"]


def test_a_save_that_is_asked_for_amid_a_step_is_that_of_the_next_version(tmp_path: Path) -> None:
    """One that is being written since before does not count."""
    outside = Outside(tmp_path)
    checkpointer, told = outside.checkpointer(), []
    outside.files.committer = SimpleNamespace(checkpointed=lambda step: told.append(step))
    outside.files.config.run.checkpoint_every = 4
    published = WeightsPublished(4, "digest")
    checkpointer.observed(0.0, published, ())
    outside.files.orchestrator.state.trainer.phase = TrainerPhase.TRAINING
    checkpointer.save_soon(lambda: told.append("saved"))
    checkpointer.from_trainer(ms.Saved(4))
    assert outside.asked == [ms.Save(4)] and told == [4]
    checkpointer.observed(0.0, WeightsPublished(5, "digest"), ())
    checkpointer.from_trainer(ms.Saved(5))
    assert outside.asked == [ms.Save(4), ms.Save(5)] and told == [4, 5, "saved"]
    checkpointer.observed(0.0, WeightsPublished(6, "digest"), ())
    assert len(outside.asked) == 2


def test_a_save_is_forgotten_with_the_trainer_that_was_asked(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    checkpointer, told = outside.checkpointer(), []
    checkpointer.save_soon(lambda: told.append("saved"))
    checkpointer.trainer_lost()
    checkpointer.from_trainer(ms.Saved(3))
    checkpointer.observed(0.0, WeightsPublished(4, "digest"), ())
    assert outside.asked == [ms.Save(3)] and not told


@pytest.mark.parametrize(("because", "told"), [(None, "by the user"), ("no memory", "no memory")])
def test_a_stop_is_logged_once(
    because: str | None, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Outside(tmp_path).checkpointer()
    with caplog.at_level(logging.INFO, logger="dora_rl"):
        checkpointer.stop(because)
        checkpointer.stop(because)
    assert caplog.messages == [f"stop asked: {told}"]


def test_a_stop_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    checkpointer = outside.checkpointer()
    checkpointer.stop()
    checkpointer.from_rollout(0, ms.Prefixes((), [], asked=True))
    checkpointer.lost(1)
    assert outside.frozen


@pytest.mark.parametrize(("ours", "failed"), [(False, False), (True, True)])
def test_a_checkpoint_that_is_not_committed_pushes_none_out(
    ours: bool, failed: bool, tmp_path: Path
) -> None:
    """The ledger goes on from the older one."""
    checkpoints = tmp_path / "checkpoints"
    for step in (20, 40):
        (checkpoints / f"step-{step}").mkdir(parents=True)
    settings = SimpleNamespace(
        keep_checkpoints=1, durable=True, commit_every_s=0.0, snapshot_every=10_000
    )
    config: Any = SimpleNamespace(run=settings, train=SimpleNamespace(behaviour=Behaviour.ENGINE))
    writer: Any = SimpleNamespace(failed=failed, dirty=True, pressing=False)
    history: Any = SimpleNamespace(due=lambda new: False)
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        committer = Committer(
            config,
            ledger,
            writer,
            lambda: Flushed(ledger.position, ()),
            history,
            SampleStore(tmp_path / "trajectories"),
            out=tmp_path,
            weights=tmp_path / "weights",
            checkpoints=checkpoints,
            ours=ours,
        )
        committer.checkpointed(40)
        assert committer.commit_in_s() is None
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-20", "step-40"]


@pytest.mark.parametrize(("keep", "left"), [(1, [40, 60]), (2, [20, 40, 60]), (3, [0, 20, 40, 60])])
def test_a_later_checkpoint_pushes_none_out_before_it_is_committed(
    keep: int, left: list[int], tmp_path: Path
) -> None:
    """The trainer may be done with step 60 when that of step 40 is committed."""
    checkpoints = tmp_path / "checkpoints"
    for step in (0, 20, 40, 60):
        (checkpoints / f"step-{step}").mkdir(parents=True)
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path, keep_checkpoints=keep)
        run.committer.checkpointed(40)
        assert [row.step for row in ledger.checkpoints()] == [40]
    assert sorted(step for step, _ in checkpoints_in(checkpoints)) == left


class Committed:
    """A run whose journal grows by hand, with a snapshot due every five events."""

    def __init__(self, ledger: Ledger, out: Path, *, keep_checkpoints: int = 1) -> None:
        self.told = Told(Settings())
        samples = SampleStore(out / "trajectories")
        self.ledger_writer = LedgerWriter(self.told.core, samples)
        self.records = 0
        self.files: tuple[int, ...] = ()
        settings = SimpleNamespace(
            keep_checkpoints=keep_checkpoints,
            durable=True,
            commit_every_s=0.0,
            snapshot_every=5,
        )
        train = SimpleNamespace(behaviour=Behaviour.ENGINE)
        config: Any = SimpleNamespace(run=settings, train=train)
        self.committer = Committer(
            config,
            ledger,
            self.ledger_writer,
            self._flushed,
            self.told.history,
            samples,
            out=out,
            weights=out / "weights",
            checkpoints=out / "checkpoints",
            ours=True,
        )

    def _flushed(self) -> Flushed:
        return Flushed(Position(self.records, 10 * self.records, 0.0, "ab" * 32), self.files)

    def commit_at(self, records: int) -> None:
        self.records = records
        self.committer.commit()


def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SNAPSHOTS).touch()  # where the directory would be
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path)
        for records, warnings in ((5, 1), (6, 1), (9, 1), (10, 2)):  # not tried at every commit
            run.commit_at(records)
            assert ledger.position.records == records
            assert ledger.snapshot() is None and not run.ledger_writer.failed
            assert len(caplog.messages) == warnings
        assert f"no snapshot in `{tmp_path / SNAPSHOTS}`" in caplog.text
        (tmp_path / SNAPSHOTS).unlink()
        run.commit_at(15)
        row = ledger.snapshot()
        assert row is not None and row.records == 15


def test_nothing_is_committed_after_changes_were_lost(tmp_path: Path) -> None:
    """They had left the writer when the commit failed, whatever it failed of."""
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path)
        run.told.history.placements.instances[0] = Path()  # type: ignore[assignment]
        with pytest.raises(TypeError, match="not known to a snapshot"):
            run.commit_at(5)
        assert run.ledger_writer.failed
        run.commit_at(6)
        assert ledger.position.records == 0


# Commits that the driver does not wait for


def test_a_commit_is_under_way_until_its_files_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path)
        monkeypatch.setattr(os, "fsync", lambda file: synced.wait(PATIENCE_S))
        run.records, run.files, run.ledger_writer.dirty = 3, (0,), True
        run.committer.commit_if_due()
        run.committer.delete(1)  # after this commit began: it is for the next one
        run.records, run.ledger_writer.dirty = 4, True
        run.committer.commit_if_due()
        assert ledger.position.records == 0, "the journal is not on the disk"
        assert run.committer.commit_in_s() == pytest.approx(0.01)
        synced.set()
        wait_until(lambda: run.committer.commit_if_due() or ledger.position.records >= 3)
        run.committer.complete()
        assert ledger.position.records == 4
        run.committer.close()


def test_a_commit_waits_for_the_one_that_is_under_way(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path)
        run.records, run.ledger_writer.dirty = 3, True
        run.committer.commit_if_due()
        run.commit_at(7)
        assert ledger.position.records == 7
        run.committer.close()


def test_a_file_that_cannot_be_synced_ends_the_run_before_the_ledger_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        run = Committed(ledger, tmp_path)
        monkeypatch.setattr(os, "fsync", full)
        run.records, run.files, run.ledger_writer.dirty = 3, (0,), True
        run.committer.commit_if_due()
        with pytest.raises(OSError, match="No space left"):
            run.committer.complete()
        assert ledger.position.records == 0 and run.ledger_writer.failed
        run.committer.close()


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
