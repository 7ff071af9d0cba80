"""Samples by reference: what every transport of them keeps, and files in a directory."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from dora_rl.core.protocol.types import Segment
from dora_rl.samples import (
    RecordRef,
    Span,
    Trajectory,
    pack,
    pack_tokens,
    unpack,
    unpack_tokens,
)
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples import SampleSink, SampleSource
from dora_rl.transports.samples.memory import SampleMemory
from dora_rl.transports.samples.shared_directory import SampleReader, SampleStore, SampleWriter

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
LOGPROBS = st.floats(allow_nan=False, allow_infinity=True)


# Records


@given(TOKENS, TOKENS, st.data())
def test_a_trajectory_comes_back_to_the_bit(
    prompt: tuple[int, ...], tokens: tuple[int, ...], data: st.DataObject
) -> None:
    logprobs = data.draw(st.tuples(*[LOGPROBS] * len(tokens)))
    whole = Trajectory(
        id=data.draw(st.integers(0, 2**40)),
        group=3,
        version=7,
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        segments=(Segment(7, "digest", len(tokens)),),
        truncated=data.draw(st.booleans()),
        observed=(Span(0, 1),) if tokens else (),
        turns=2,
    )
    found = unpack(pack(whole))
    assert found == whole
    assert [x.hex() for x in found.logprobs] == [x.hex() for x in logprobs]  # -0.0 too
    assert unpack_tokens(pack_tokens(tokens, logprobs)) == (tokens, logprobs)


def test_a_token_that_is_no_32_bit_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens((2**31,), (0.0,))


# What every transport keeps

Ends = tuple[SampleSink, SampleSource]


def memory(root: Path) -> Ends:
    ends = SampleMemory()
    return ends, ends


def shared_directory(root: Path) -> Ends:
    return SampleWriter(root, 3, 1, file_bytes=50), SampleReader(root)


TRANSPORTS = pytest.mark.parametrize("ends", [memory, shared_directory])


@TRANSPORTS
def test_every_record_is_read_as_it_was_put(ends: Callable[[Path], Ends], tmp_path: Path) -> None:
    sink, source = ends(tmp_path)
    records = [bytes([number]) * (number % 40) for number in range(1, 100)]
    refs = [sink.put(record) for record in records]
    assert len(set(refs)) == len(refs)
    for ref, record in reversed(list(zip(refs, records, strict=True))):
        assert source.get(ref) == record
        assert source.get(RecordRef(*ref)) == record  # again
    sink.close()


@TRANSPORTS
def test_what_was_never_put_is_lost(ends: Callable[[Path], Ends], tmp_path: Path) -> None:
    sink, source = ends(tmp_path)
    ref = sink.put(b"something")
    with pytest.raises(RecordLost, match=r"never put|damaged"):
        source.get(ref._replace(offset=ref.offset + 1000))
    sink.close()


# Files of records


def test_damage_is_told_with_the_file(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, 0, 0)
    first, second = writer.put(b"first"), writer.put(b"second")
    path = tmp_path / "0-0-0"
    path.write_bytes(b"firstsecone")
    reader = SampleReader(tmp_path)
    assert reader.get(first) == b"first"
    with pytest.raises(RecordLost, match="0-0-0` is damaged: 6 bytes from 5 on"):
        reader.get(second)
    os.truncate(path, 8)
    with pytest.raises(RecordLost, match="damaged"):
        reader.get(second)
    path.unlink()
    writer.close()
    with pytest.raises(RecordLost, match=r"0-0-0` cannot be read, .*: No such file"):
        reader.get(first)


def test_nobody_writes_into_the_file_of_another(tmp_path: Path) -> None:
    first = SampleWriter(tmp_path, 0, 0)
    first.put(b"a")
    with pytest.raises(FileExistsError):
        SampleWriter(tmp_path, 0, 0).put(b"b")
    first.close()


def test_after_a_write_that_failed_halfway_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, real = SampleWriter(tmp_path, 0, 0), SampleReader(tmp_path), os.write
    before = writer.put(b"before")
    calls: list[Any] = []

    def write(fd: int, data: Any) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no space")
        return real(fd, data[:2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="no space"):
            writer.put(b"lost")
    after = writer.put(b"after")
    assert (reader.get(before), reader.get(after)) == (b"before", b"after")
    writer.close()


def test_what_is_retained_is_on_the_disk_before_the_ledger_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, synced, real = tmp_path / "t", [], os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store, writer = SampleStore(root), SampleWriter(root, 0, 0)
    store.create()
    store.retain(writer.put(b"a"))
    store.sync()
    file, directory = (root / "0-0-0").stat().st_ino, root.stat().st_ino
    assert synced == [tmp_path.stat().st_ino, file, directory]  # the data, and each name
    store.sync()
    assert len(synced) == 3
    store.retain(writer.put(b"b"))
    store.sync()
    assert synced[3:] == [file]
    writer.close()


@settings(max_examples=60, stateful_step_count=40)
class Files(RuleBasedStateMachine):
    """However records come and go, those that are needed are there, and the rest is bounded."""

    refs = Bundle("refs")

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.place = tempfile.TemporaryDirectory()
        self.root = Path(self.place.name)
        self.store, self.reader = SampleStore(self.root), SampleReader(self.root)
        self.incarnations = {0: 0, 1: 0}
        self.writers = {name: SampleWriter(self.root, name, 0, file_bytes=30) for name in (0, 1)}
        self.needed: dict[RecordRef, bytes] = {}
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "place"):
            for writer in self.writers.values():
                writer.close()
            self.place.cleanup()

    @rule(target=refs, instance=st.sampled_from([0, 1]), size=st.integers(0, 40))
    def put(self, instance: int, size: int) -> RecordRef:
        self.number += 1
        record = self.number.to_bytes(4, "big") + bytes(size)
        ref = self.writers[instance].put(record)
        self.store.retain(ref)
        self.needed[ref] = record
        return ref

    @rule(instance=st.sampled_from([0, 1]))
    def put_what_is_superseded(self, instance: int) -> None:
        self.store.seen(self.writers[instance].put(b"x" * 10))

    @rule(ref=consumes(refs))
    def release(self, ref: RecordRef) -> None:
        if self.needed.pop(ref, None) is not None:
            self.store.release(ref)

    @rule(instance=st.sampled_from([0, 1]))
    def replace(self, instance: int) -> None:
        """Its process dies, another takes its place."""
        self.incarnations[instance] += 1
        self.writers[instance].close()
        writer = SampleWriter(self.root, instance, self.incarnations[instance], file_bytes=30)
        self.writers[instance] = writer

    @rule()
    def commit(self) -> None:
        self.store.sync()
        self.store.collect()
        needed = {(r.instance, r.incarnation, r.file) for r in self.needed}
        assert len(list(self.root.iterdir())) <= len(needed) + 2

    @rule()
    def resume(self) -> None:
        """Another driver takes over: it knows what its ledger names, and nothing else."""
        self.store = SampleStore(self.root)
        for ref in self.needed:
            self.store.retain(ref)
        self.store.check(self.needed)
        self.store.sweep(self.needed)
        needed = {(r.instance, r.incarnation, r.file) for r in self.needed}
        assert len(list(self.root.iterdir())) == len(needed)
        for name in self.writers:
            self.replace(name)

    @invariant()
    def nothing_is_lost(self) -> None:
        for ref, record in getattr(self, "needed", {}).items():
            assert self.reader.get(ref) == record


TestFiles = Files.TestCase
