"""A running trajectory as bytes, for a move to another engine in this or another process.

msgpack by a fixed schema, never pickle: decoding runs no code, and whatever does not fit the
schema is refused. A checksum of the whole stands before it. It knows the format and nothing of
engines; who imports checks version, digest and shape against its own.
"""

import struct
import zlib

import msgspec

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.base import Request, Sampling
from dora_rl.engines.errors import ImportRefused

FORMAT = 3
_CRC = struct.Struct("<I")


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a trajectory needs to continue elsewhere.

    `generated` is the whole response: prefix, sampled and observed. `held`: its turn has ended,
    by the last token of that.
    """

    format: int = FORMAT
    model: str  # what the KV fits: see `kv_shape`
    trajectory: TrajectoryId
    version: Version
    digest: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    seed: int
    sampling: Sampling
    hold: bool
    held: bool
    turn_start: int
    kv_tokens: int  # those that the KV is of, from the first
    kv_dtype: str
    kv_shape: tuple[int, ...]
    kv: tuple[bytes, ...]  # in parts, since msgpack ends at 4 GiB

    def request(self) -> Request:
        """The trajectory as a request that continues after what it has."""
        return Request(
            trajectory=self.trajectory,
            version=self.version,
            prompt=self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            prefix=self.generated,
            hold=self.hold,
            turn_start=self.turn_start,
            held=self.held,
        )


class Response(msgspec.Struct, frozen=True):
    """Of an `Export`, whose response it is and what it says; the KV is skipped."""

    trajectory: TrajectoryId
    version: Version
    generated: tuple[int, ...]


def encode(export: Export) -> bytes:
    return seal(msgspec.msgpack.encode(export))


def seal(message: bytes) -> bytes:
    """The message behind its checksum."""
    return _CRC.pack(zlib.crc32(message)) + message


def unseal(data: bytes) -> memoryview:
    """The message behind its checksum, or a refusal if it is not what was sealed."""
    message = memoryview(data)[_CRC.size :]
    if len(data) < _CRC.size or zlib.crc32(message) != _CRC.unpack_from(data)[0]:
        raise _refusal(data, "their checksum is wrong")
    return message


def response_of(data: bytes) -> Response:
    """Whose response an export holds, without its KV and without its checksum."""
    try:
        return msgspec.msgpack.decode(memoryview(data)[_CRC.size :], type=Response)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(data, str(error).rstrip(".")) from None


def decode(data: bytes) -> Export:
    """The exported trajectory, or a refusal that says what is wrong with the bytes."""
    message = unseal(data)
    try:
        export = msgspec.msgpack.decode(message, type=Export)
        export.request()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refusal(data, str(error).rstrip(".")) from None
    if export.format != FORMAT:
        raise ImportRefused(
            f"an exported trajectory of format {export.format}: this engine reads {FORMAT}. "
            "Run the same version of dora-rl on both sides."
        )
    return export


def _refusal(data: bytes, why: str) -> ImportRefused:
    return ImportRefused(
        f"these {len(data)} bytes are not an exported trajectory: {why}. Export it again."
    )
