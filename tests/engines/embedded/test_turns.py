"""Between turns: what is read, where the KV lies, and what transformers says of it all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_rl.engines import wire
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine
from dora_rl.engines.embedded.forwarding import Chunk
from dora_rl.engines.errors import ImportRefused, RequestRefused
from tests.engines.driving import OLD, Drive, Harness, ask, assert_as_alone, start
from tests.engines.embedded.harness import EmbeddedHarness
from tests.engines.embedded.test_parity import FP32, Checked, reference
from tests.engines.random_versions import Models
from tests.engines.turns import assert_as_read, brief, talk
from tests.models.random_models import random_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(params=[True, False], ids=["deterministic", "normal"])
def harness(request: pytest.FixtureRequest, models: Models) -> Iterator[Harness]:
    with EmbeddedHarness(models, deterministic=request.param) as made:
        yield made


def embedded(drive: Drive) -> EmbeddedEngine:
    assert isinstance(drive.engine, EmbeddedEngine)
    return drive.engine


def count_reads(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass reads, besides those that are fed to sample the next."""
    counts: list[int] = []
    forwarder = engine._forwarder()
    read = forwarder.read

    def counting(chunks: list[Chunk]) -> None:
        counts.append(sum(chunk.count for chunk in chunks))
        read(chunks)

    monkeypatch.setattr(forwarder, "read", counting)
    return counts


def test_siblings_share_their_prompt_and_every_token_is_read_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = harness.prompt(0, 33)
    requests = [replace(brief(harness, i), prompt=prompt) for i in range(4)]
    drive = start(harness, slots=2, prefill_chunk=7)
    counts = count_reads(embedded(drive), monkeypatch)
    drive.submit(*requests)
    drive.until_held(0, 1, 2, 3)
    shared, block = 32, 4
    assert drive.engine.load().kv_used_tokens == shared + 4 * block
    assert sum(counts) == shared
    for turn in range(2):
        for i in range(4):
            drive.extend(i, (turn, i, 5))
        drive.until_held(0, 1, 2, 3)
        # The token that ended the turn, and all that was said but the last, which is fed.
        assert sum(counts) == shared + 4 * 3 * (turn + 1)
    assert drive.engine.load().kv_used_tokens == shared + 4 * 3 * block
    assert_as_read(harness, drive, requests)


@pytest.mark.parametrize("first", ["running", "held"])
def test_a_long_pause_does_not_slow_the_others(harness: Harness, first: str) -> None:
    """Attention reads over what lies between: much of it goes to the host, and comes back."""
    drive = start(harness, slots=8, prefill_chunk=20)
    busy = {0, 7}
    requests = [brief(harness, i, length=60, max_tokens=36) for i in range(8)]
    if first == "running":
        for i in busy:
            requests[i] = talk(harness, i, length=60, max_tokens=36, stop_token_ids=())
    drive.submit(*requests)
    drive.until_held(*(set(range(8)) - (busy if first == "running" else set())))
    drive.step()
    if first == "held":
        for i in busy:
            drive.extend(i, harness.prompt(i, 30))
        drive.step()
    running = list(embedded(drive)._scheduler.running.values())
    assert [sequence.id for sequence in running] == [0, 7]
    blocks = [block for s in running for block in (*s.kv.blocks, *s.prompt.kv.blocks)]
    assert max(blocks) - min(blocks) + 1 <= 1.5 * len(blocks) + 16
    for i in set(range(8)) - busy:
        drive.extend(i, (i, 5))
    drive.run()
    assert_as_read(harness, drive, requests)


@pytest.mark.parametrize("free", [1, 2])
def test_an_extension_needs_the_room_that_it_adds(harness: Harness, free: int) -> None:
    """In blocks of four: four are held, another runs in five, and two more are needed."""
    drive = start(harness, slots=2, kv_budget_tokens=4 * (9 + free))
    requests = [brief(harness, 1, max_tokens=20), ask(harness, 2, length=17, max_tokens=12)]
    drive.submit(requests[0])
    drive.until_held(1)
    drive.extend(1, harness.prompt(5, 8))
    drive.until_held(1)
    drive.submit(requests[1])
    drive.step()
    assert drive.engine.load().kv_used_tokens == 4 * 9
    drive.extend(1, harness.prompt(6, 8))
    drive.step()
    load = drive.engine.load()
    assert load.versions[OLD].held == (free == 2)  # it has answered, or waits
    assert load.waiting == (free == 1)
    drive.run()
    assert drive.parks == 0
    assert_as_read(harness, drive, requests[:1])
    assert_as_alone(harness, drive, requests[1:])


def test_a_short_pause_moves_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = start(harness, slots=4)
    requests = [brief(harness, 1, length=9), talk(harness, 2, stop_token_ids=())]
    drive.submit(*requests)
    drive.until_held(1)
    engine = embedded(drive)
    monkeypatch.setattr(engine._pool, "write", lambda *_: pytest.fail("KV came from the host"))
    blocks = list(engine._sequence(1).kv.blocks)
    drive.step(3)
    drive.extend(1, (1, 2))
    drive.step()
    assert engine._sequence(1).kv.blocks[: len(blocks)] == blocks
    drive.run()
    assert_as_read(harness, drive, requests)


def test_a_strange_last_token_is_not_taken_over(harness: Harness) -> None:
    source, target = start(harness), start(harness)
    source.submit(brief(harness, 1))
    source.until_held(1)
    export = wire.decode(source.export(1))
    for strange, refused in ((-1, ImportRefused), (harness.vocab_size, RequestRefused)):
        damaged = msgspec.structs.replace(export, generated=(strange,))
        with pytest.raises(refused, match=f"`{strange}`"):
            target.engine.import_trajectory(wire.encode(damaged))
    target.check()


@pytest.mark.parametrize("deterministic", [True, False])
def test_logprobs_of_an_episode_are_those_of_transformers(
    tmp_path: Path, deterministic: bool
) -> None:
    """Four episodes with one prompt, with little room, one of them moved between turns."""
    checked = Checked(random_model("qwen3", seed=5), tmp_path)
    source = checked.make(deterministic=deterministic, slots=2, kv_budget_tokens=64)
    target = checked.make(deterministic=deterministic)
    prompt = tuple(range(3, 20))
    sampling = Sampling(max_tokens=40, raw_logprobs=True, ignore_eos=True)
    size = source.config.vocab_size
    sampling = replace(sampling, stop_token_ids=tuple(range(0, size, 2)))
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    raw: dict[int, dict[int, float]] = {i: {} for i in tokens}
    where = dict.fromkeys(tokens, source)
    for i in tokens:
        source.submit(Request(i, 0, prompt, sampling, seed=1, hold=True))
    turns = dict.fromkeys(tokens, 0)
    while not (source.idle and target.idle):
        for output in (*source.step(), *target.step()):
            if not isinstance(output, Sampled):
                continue
            assert output.raw_logprobs is not None
            i = output.trajectory
            raw[i][len(tokens[i])] = output.raw_logprobs[0]
            tokens[i] += output.tokens
            if output.finish is None or len(tokens[i]) > 30:
                continue
            turns[i] += 1
            if i == 2 and where[i] is source:
                target.import_trajectory(source.export_trajectory(i))
                assert source.cancel(i)
                where[i] = target
            said = (i + 1, turns[i] + 5, 9)
            where[i].extend(i, said)
            tokens[i] += said
    for i in tokens:
        assert turns[i] > 1
        expected = reference(checked.model, prompt, tokens[i])
        assert max(abs(expected[at] - found) for at, found in raw[i].items()) < FP32
