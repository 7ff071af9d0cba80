"""What every launcher shares, apart from any launcher."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from dora_rl.core.protocol.commands import Train
from dora_rl.core.protocol.types import BatchGroup
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.records.ledger_writer import _encode_batch
from dora_rl.store.ledger import BatchRow, Changes, Ledger, Position
from dora_rl.transports.samples.shared_directory import SampleReader, SampleStore, SampleWriter
from tests.runtime.test_ledger_writer import whole


class Redoing:
    """A launcher as far as steps are concerned that a trainer takes again."""

    _redo_steps, _redone = Runtime._redo_steps, Runtime._redone

    def __init__(self, ledger: Ledger, store: SampleStore) -> None:
        trainer = SimpleNamespace(step=2)
        core = SimpleNamespace(state=SimpleNamespace(trainer=trainer))
        self._files = SimpleNamespace(ledger=ledger, sample_store=store, orchestrator=core)
        self._redoing: dict[int, ms.Redo] = {}
        self.asked: list[Any] = []

    def to_trainer(self, message: ms.ToTrainer) -> None:
        self.asked.append(message)


def test_what_a_step_is_taken_again_from_stays_until_it_is(tmp_path: Path) -> None:
    """Also if the checkpoint that has the step is found and committed before that."""
    store, reader = SampleStore(tmp_path / "t"), SampleReader(tmp_path / "t")
    store.create()
    writer = SampleWriter(tmp_path / "t", 0, 0, file_bytes=1)
    changes = Changes(Position(1, 1, 0.0))
    refs = []
    for step in range(2):
        ref = writer.put(b"record")
        refs.append(ref)
        item = whole(step, reward=1.0)
        item.trajectory = msgspec.structs.replace(item.trajectory, content=ref)
        changes.payloads[step] = msgspec.msgpack.encode(item)
        command = Train(step, (BatchGroup(step, 0, (step,)),))
        changes.batches.append(BatchRow(step, "trained", _encode_batch(command)))
        store.retain(ref)
    store.seen(writer.put(b"later"))
    writer.close()
    with Ledger.create(tmp_path / "ledger.sqlite", {}) as ledger:
        ledger.commit(changes)
        launcher: Any = Redoing(ledger, store)
        launcher._redo_steps()
        launcher._redo_steps()  # of the next trainer: the first has died
        assert [message.step for message in launcher.asked] == [0, 1, 0, 1]
        for ref in refs:
            store.release(ref)  # a checkpoint has both steps
        store.collect()
        assert [reader.get(ref) for ref in refs] == [b"record"] * 2
        launcher._redone(0)
        store.collect()
        assert not (tmp_path / "t" / "0-0-0").exists() and reader.get(refs[1]) == b"record"
        launcher._redone(1)
        launcher._redone(1)  # a duplicate
        store.collect()
        assert {path.name for path in (tmp_path / "t").iterdir()} == {"0-0-2"}
