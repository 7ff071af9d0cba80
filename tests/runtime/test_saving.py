"""How a run stops, and what a checkpoint may push out: parts of it, driven by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.state import TrainerPhase
from dora_rl.runtime import messages as ms
from dora_rl.runtime.durability import Durability
from dora_rl.runtime.saving import Saver
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER
from dora_rl.trainer.settings import Behaviour


class Outside:
    """What a run's saver sees of the world: two instances, an idle trainer."""

    def __init__(self, place: Path) -> None:
        self.asked: list[Any] = []
        self.frozen = False
        fleet = SimpleNamespace(instances={0: None, 1: None})
        trainer = SimpleNamespace(phase=TrainerPhase.IDLE)
        versions = SimpleNamespace(newest=3)
        state = SimpleNamespace(fleet=fleet, trainer=trainer, versions=versions)
        run = SimpleNamespace(checkpoint_every=None, durable=True)
        self.session = SimpleNamespace(
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

    def saver(self) -> Saver:
        return Saver(self, self.session, self)  # type: ignore[arg-type]


def test_a_stop_waits_for_what_it_asked_for(tmp_path: Path) -> None:
    """Instances also say it unasked, every few seconds: that is not their last word."""
    outside = Outside(tmp_path)
    saver = outside.saver()
    unasked, asked = ms.Prefixes((), []), ms.Prefixes((), [], asked=True)
    for instance in (0, 1):
        saver.from_rollout(instance, unasked)
    saver.stop()
    assert outside.asked == [ms.SavePrefixes()]
    for instance in (0, 1):
        saver.from_rollout(instance, unasked)
    saver.from_rollout(0, asked)
    assert not outside.frozen
    saver.from_rollout(1, asked)
    assert outside.frozen
    assert isinstance(outside.asked[-1], ms.Save)


def test_a_stop_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    saver = outside.saver()
    saver.stop()
    saver.from_rollout(0, ms.Prefixes((), [], asked=True))
    saver.lost(1)
    assert outside.frozen


@pytest.mark.parametrize(("ours", "failed"), [(False, False), (True, True)])
def test_a_checkpoint_that_is_not_committed_pushes_none_out(
    ours: bool, failed: bool, tmp_path: Path
) -> None:
    """The ledger goes on from the older one."""
    checkpoints = tmp_path / "checkpoints"
    for step in (20, 40):
        (checkpoints / f"step-{step}").mkdir(parents=True)
    settings = SimpleNamespace(keep_checkpoints=1, durable=True, commit_every_s=0.0)
    config: Any = SimpleNamespace(run=settings, train=SimpleNamespace(behaviour=Behaviour.ENGINE))
    books: Any = SimpleNamespace(failed=failed, dirty=True, pressing=False)
    with Ledger.create(tmp_path / LEDGER, {}) as ledger:
        durability = Durability(
            config,
            ledger,
            books,
            lambda: ledger.position,
            weights=tmp_path / "weights",
            checkpoints=checkpoints,
            ours=ours,
        )
        durability.checkpointed(checkpoints / "step-40")
        assert durability.commit_in_s() is None
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-20", "step-40"]
