"""A trajectory that moves between two engines of vLLM takes its KV along, and uses it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dora_rl.engines import wire
from dora_rl.engines.errors import ImportRefused
from tests.engines.driving import OLD, Drive, ask, start
from tests.engines.random_versions import AdapterModels
from tests.engines.vllm.harness import Backends, VllmHarness
from tests.engines.vllm.shape import BLOCK
from tests.engines.vllm.test_versions import assert_logprobs, engine_of

pytestmark = pytest.mark.vllm
LONG = 4 * BLOCK + 5  # tokens of a prompt
WISH: dict[str, Any] = {"length": LONG, "max_tokens": 2 * BLOCK, "raw_logprobs": True}


@pytest.fixture
def harness(vllm_harness: VllmHarness) -> Iterator[VllmHarness]:
    with vllm_harness:
        yield vllm_harness


def two(harness: VllmHarness, **settings: int) -> tuple[Drive, Drive]:
    """Engines of the same version that read a prompt in pieces of a block."""
    records: dict[int, Any] = {}
    source = start(harness, prefill_chunk=BLOCK, **settings)
    target = start(harness, prefill_chunk=BLOCK, **settings)
    source.records = target.records = records
    target.submit(ask(harness, 99, max_tokens=7 * BLOCK))  # alone, a prompt is read at once
    target.until(99, 1)
    return source, target


def steps_to_next(drive: Drive, trajectory: int) -> int:
    """Steps until it has another token."""
    before, had = len(drive.records[99].tokens), len(drive.records[trajectory].tokens)
    drive.until(trajectory, had + 1)
    return len(drive.records[99].tokens) - before


@pytest.mark.parametrize("sampled", [1, 2, BLOCK - 6, BLOCK - 5, BLOCK + 3])
def test_what_moved_is_not_computed_anew(harness: VllmHarness, sampled: int) -> None:
    """Whether its last block is begun, full or new: its next token comes with the next step."""
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    source.submit(request)
    source.until(1, sampled)
    source.move(1, target)
    assert steps_to_next(target, 1) == 1
    target.run()
    assert_logprobs(harness, request, target.records[1], 0)


def test_by_its_tokens_it_is_computed_anew(harness: VllmHarness) -> None:
    """So that one step, above, is not what anything would take."""
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    source.submit(request)
    source.until(1, 2)
    source.move_by_tokens(1, target)
    assert steps_to_next(target, 1) == 5
    target.run()
    assert_logprobs(harness, request, target.records[1], 0)


def test_the_kv_that_came_is_what_it_continues_with(harness: VllmHarness) -> None:
    """Other KV gives other log-probabilities: nothing is computed behind our back."""
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    source.submit(request)
    source.until(1, 2)
    export = wire.decode(source.export(1))
    source.cancel(1)
    other = msgspec.structs.replace(export, kv=tuple(bytes(len(part)) for part in export.kv))
    target.take(wire.encode(other), request)
    target.run()
    with pytest.raises(AssertionError):
        assert_logprobs(harness, request, target.records[1], 0)


def test_it_moves_before_its_prompt_is_read(harness: VllmHarness) -> None:
    """With what is read of it."""
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    source.submit(ask(harness, 98, max_tokens=60))
    source.until(98, 1)
    source.submit(request)
    source.step(3)
    assert not source.records[1].tokens
    source.move(1, target)
    assert steps_to_next(target, 1) == 2
    target.run()
    source.run()
    assert_logprobs(harness, request, target.records[1], 0)


def test_it_comes_to_where_its_prompt_is_known(harness: VllmHarness) -> None:
    """One of its group is there, whose blocks it shares and does not write to."""
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    mate = replace(request, trajectory=2)
    target.submit(mate)
    target.until(2, 3)
    source.submit(request)
    source.until(1, 9)
    used = target.engine.load().kv_used_tokens
    source.move(1, target)
    assert steps_to_next(target, 1) == 1
    assert target.engine.load().kv_used_tokens - used == BLOCK  # the fifth; four are shared
    target.run()
    for one in (request, mate):
        assert_logprobs(harness, one, target.records[one.trajectory], 0)


def test_what_came_is_shared_with_who_comes_after(harness: VllmHarness) -> None:
    source, target = two(harness)
    request = ask(harness, 1, **WISH)
    source.submit(request)
    source.until(1, 2)
    source.move(1, target)
    target.until(1, 3)
    mate = replace(request, trajectory=2)
    target.submit(mate)
    assert steps_to_next(target, 2) == 1
    target.run()
    assert_logprobs(harness, mate, target.records[2], 0)


def test_too_little_room_is_waited_for_and_nothing_is_lost(harness: VllmHarness) -> None:
    """What came may wait, be started, preempted, and computed anew after all."""
    source, target = two(harness, slots=3, kv_budget_tokens=12 * BLOCK)
    target.cancel(99)
    requests = [ask(harness, n, **WISH) for n in (1, 2, 3)]
    for request in requests:
        source.submit(request)
        source.until(request.trajectory, 3)
        source.move(request.trajectory, target)
    target.run()
    for request in requests:
        assert_logprobs(harness, request, target.records[request.trajectory], 0)


def test_nothing_is_kept_of_what_was_cancelled(harness: VllmHarness) -> None:
    source, target = two(harness, slots=1)
    request = ask(harness, 1, **WISH)
    source.submit(request)
    source.until(1, 2)
    source.move(1, target)  # waits: the slot is taken
    assert engine_of(target).backend._handed._handed
    target.cancel(1)
    assert not engine_of(target).backend._handed._handed


def test_a_step_that_a_probe_took_is_not_part_of_it(
    adapters: AdapterModels, backends: Backends
) -> None:
    """While a version is installed vLLM goes on; what nobody has heard of does not move."""
    with VllmHarness(adapters, backends) as harness:
        assert isinstance(harness, VllmHarness)
        source, target = two(harness, version_slots=3)
        request = ask(harness, 1, **WISH)
        source.submit(request)
        source.until(1, 2)
        source.evict(4)
        source.install(4, harness.weights(3))
        assert engine_of(source).backend._backlog
        source.move(1, target)
        assert steps_to_next(target, 1) == 1
        target.run()
        assert_logprobs(harness, request, target.records[1], 0)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "vLLM 0.1"},
        {"kv_dtype": "bfloat16"},
        {"kv_dtype": "int3"},
        {"kv_tokens": LONG + 2},  # of two tokens, one is yet to be computed
        {"kv_tokens": -1},
        {"kv_tokens": BLOCK},  # in five blocks
        {"kv_shape": ()},
        {"kv_shape": (2, 10**9, 1, BLOCK, 64)},
        {"kv": ()},
        {"kv": (b"", b"")},
        {"digest": "0" * 64},
        {"version": 55},
    ],
)
def test_kv_that_does_not_fit_is_refused(harness: VllmHarness, other: dict[str, Any]) -> None:
    source, target = two(harness)
    source.submit(ask(harness, 1, **WISH))
    source.until(1, 2)
    export = wire.decode(source.export(1))
    with pytest.raises(ImportRefused, match="trajectory 1 "):
        target.engine.import_trajectory(wire.encode(msgspec.structs.replace(export, **other)))
    target.check()
    source.resume(1)
    source.run()
    target.cancel(99)
    assert target.engine.idle


def test_engines_of_other_blocks_do_not_take_it(harness: VllmHarness) -> None:
    source = start(harness)
    request = ask(harness, 1, OLD, **WISH)
    source.submit(request)
    source.until(1, 2)
    data = source.export(1)
    target = start(harness)
    backend = engine_of(target).backend
    assert backend.kv_layout is not None
    backend.kv_layout = backend.kv_layout._replace(kernels="CPUAttentionBackendImpl amx")
    try:
        with pytest.raises(ImportRefused, match="same kind of processor"):
            target.engine.import_trajectory(data)
    finally:
        backend.kv_layout = backend._handed.layout
