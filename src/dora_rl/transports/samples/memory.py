"""Samples within one process: a fake for tests of whoever writes or reads them."""

from dora_rl.samples import RecordRef
from dora_rl.transports.errors import RecordLost


class SampleMemory:
    """Both ends of the transport."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    def put(self, record: bytes) -> RecordRef:
        self._records.append(record)
        return RecordRef(0, 0, 0, len(self._records) - 1, len(record), checksum=0)

    def close(self) -> None: ...

    def get(self, ref: RecordRef) -> bytes:
        if not 0 <= ref.offset < len(self._records):
            raise RecordLost(f"record {ref.offset} was never put, though it is needed.")
        record = self._records[ref.offset]
        if len(record) != ref.size:
            raise RecordLost(f"record {ref.offset} is damaged: it has another size.")
        return record
