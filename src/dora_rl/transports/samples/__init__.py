"""Samples by reference: whoever writes gets a `RecordRef`, whoever has that can read."""

from typing import Protocol

from dora_rl.samples import RecordRef


class SampleSink(Protocol):
    """A rollout worker's end."""

    def put(self, record: bytes) -> RecordRef:
        """Store a record; when this returns, every reader of the run finds it.

        An `OSError` if there is no room for it; the next record may find some.
        """

    def close(self) -> None:
        """Nothing more is put; what was put stays."""


class SampleSource(Protocol):
    """A reader's end."""

    def get(self, ref: RecordRef) -> bytes:
        """The record as it was written; `RecordLost` if it is not there, or not whole."""
