"""A running trajectory as bytes, for a move to another engine in this or another process.

msgpack by a fixed schema, never pickle: decoding runs no code, and whatever does not fit the
schema is refused. The KV is one block of plain numbers with its checksum. It knows the format
and nothing of engines; who imports checks version, digest and shape against its own.
"""

import zlib

import msgspec

from dora_rl.core.types import TrajectoryId, Version
from dora_rl.engines.base import Request, Sampling
from dora_rl.engines.errors import ImportRefused

FORMAT = 1


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a trajectory needs to go on elsewhere; `generated` includes the prefix."""

    format: int = FORMAT
    model: str  # what the KV fits: see `kv_shape`
    trajectory: TrajectoryId
    version: Version
    digest: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    seed: int
    sampling: Sampling
    kv_dtype: str
    kv_shape: tuple[int, ...]
    kv_crc32: int
    kv: bytes

    def request(self) -> Request:
        """The trajectory as a request that goes on after what it has."""
        return Request(
            trajectory=self.trajectory,
            version=self.version,
            prompt=self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            prefix=self.generated,
        )


def checksum(kv: bytes | memoryview) -> int:
    return zlib.crc32(kv)


def encode(export: Export) -> bytes:
    return msgspec.msgpack.encode(export)


def decode(data: bytes) -> Export:
    """The exported trajectory, or a refusal that says what is wrong with the bytes."""
    try:
        export = msgspec.msgpack.decode(data, type=Export)
        export.request()
    except (msgspec.MsgspecError, ValueError) as error:
        raise ImportRefused(
            f"these {len(data)} bytes are not an exported trajectory: {error}. Export it again."
        ) from None
    if export.format != FORMAT:
        raise ImportRefused(
            f"an exported trajectory of format {export.format}: this engine reads {FORMAT}. "
            "Run the same version of dora-rl on both sides."
        )
    if checksum(export.kv) != export.kv_crc32:
        raise ImportRefused(
            f"the KV of trajectory {export.trajectory} was damaged on its way. Export it again."
        )
    return export
