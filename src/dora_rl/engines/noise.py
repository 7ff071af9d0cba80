"""Sampling noise as a pure function of (seed, trajectory, position).

One uniform number a token: batching, placement, migration and resume cannot change it, and
no generator has a state to carry along.
"""

import hashlib
import struct

_PACK = struct.Struct("<QQQ").pack
_SCALE = 2.0**-52


def uniform(seed: int, trajectory: int, position: int) -> float:
    """A number in (0, 1), the same on every machine; `position` counts generated tokens."""
    block = hashlib.blake2b(_PACK(seed, trajectory, position), digest_size=8).digest()
    # 52 bits: with one more, the largest would round up to 1.
    return ((int.from_bytes(block, "little") >> 12) + 0.5) * _SCALE
