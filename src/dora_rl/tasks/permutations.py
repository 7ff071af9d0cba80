"""An order of n things as a function of (seed, epoch): no state, no memory, on every machine.

A Feistel network permutes the numbers of 2k bits; numbers that fall outside of n are sent
through again until they fall inside, which leaves a permutation of n.
"""

import hashlib
import struct

_ROUNDS = 6
_PACK = struct.Struct("<QQQ").pack
_WORD = (1 << 64) - 1


def permute(index: int, length: int, seed: int, epoch: int) -> int:
    """Where `index` goes in the order of this epoch; a bijection of range(length)."""
    if not 0 <= index < length:
        raise IndexError(f"index {index} of {length}")
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(_PACK(seed & _WORD, epoch & _WORD, length), digest_size=32).digest()
    while True:
        left, right = index >> half, index & mask
        for step in range(_ROUNDS):
            mixed = hashlib.blake2b(_PACK(step, right, 0), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        index = left << half | right
        if index < length:
            return index
