"""The KV pool: blocks are given once, come back once, and keep what is written."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines.embedded.kv import KvPool
from tests.models.configurations import SMALL

BLOCKS, TOKENS = 7, 4
CONFIG = replace(SMALL, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)


def pool() -> KvPool:
    return KvPool(CONFIG, BLOCKS, TOKENS, torch.float32)


@given(st.lists(st.sampled_from(["low", "high", "back"]), max_size=60), st.randoms())
def test_blocks_are_never_given_twice(script: list[str], rng: Random) -> None:
    kv = pool()
    held: list[int] = []
    for do in script:
        if do == "back" and held:
            kv.give_back([held.pop(rng.randrange(len(held)))])
        elif do != "back" and kv.free:
            free = set(range(BLOCKS)) - set(held)
            block = kv.take_low() if do == "low" else kv.take_high()
            assert block == (min(free) if do == "low" else max(free))
            held.append(block)
        assert kv.free == BLOCKS - len(held)
        assert kv.used_tokens == len(held) * TOKENS


def test_a_block_comes_back_once() -> None:
    kv = pool()
    block = kv.take_low()
    kv.give_back([block])
    with pytest.raises(AssertionError, match="twice"):
        kv.give_back([block])


@given(st.integers(0, BLOCKS * TOKENS), st.permutations(range(BLOCKS)))
def test_what_is_written_is_read(tokens: int, order: list[int]) -> None:
    kv = pool()
    layers, _, heads, width, _ = kv.keys_LNKDT.shape
    content = torch.randn(layers, 2, tokens, heads, width)
    blocks = order[: kv.blocks_for(tokens)]
    kv.write(blocks, content)
    assert torch.equal(kv.read(blocks, tokens), content)
    if blocks and len(blocks) < BLOCKS:
        kv.move(blocks[0], order[-1])
        assert torch.equal(kv.read([order[-1], *blocks[1:]], tokens), content)


def test_blocks_come_back_clean() -> None:
    kv = pool()
    blocks = [kv.take_low(), kv.take_high()]
    kv.write(blocks, torch.full((kv.keys_LNKDT.shape[0], 2, 8, *_heads(kv)), torch.nan))
    kv.give_back(blocks)
    assert kv.read(blocks, 8).abs().sum() == 0


def test_fewer_tokens_than_blocks_are_read_and_written() -> None:
    kv = pool()
    content = torch.randn(kv.keys_LNKDT.shape[0], 2, 5, *_heads(kv))
    kv.write([1, 3, 6, 2], content)
    assert torch.equal(kv.read([1, 3, 6, 2], 5), content)
    assert kv.read([4, 5], 0).shape[2] == 0


def test_memory_does_not_grow_with_use() -> None:
    kv = pool()
    for _ in range(500):
        kv.give_back([kv.take_low()])
        kv.give_back([kv.take_high()])
    assert max(len(kv._lowest), len(kv._highest)) <= 4 * BLOCKS


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match="no memory for `4000000000000000`"):
        KvPool(CONFIG, 10**15, 4, torch.float32)


def _heads(kv: KvPool) -> tuple[int, int]:
    _, _, heads, width, _ = kv.keys_LNKDT.shape
    return heads, width
