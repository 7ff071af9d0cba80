"""Streams of prompts: pure functions of position and seed, whatever the rows come from."""

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import UserError
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.permutations import permute
from dora_rl.tasks.prompts import PromptStream, prompt_of
from dora_rl.tasks.sources import open_source
from tests.tasks import samples


def stream_of(prompts: Any, *, options: dict[str, Any] | None = None, **how: Any) -> PromptStream:
    key = how.get("prompt_key", "prompt")
    source = open_source(
        prompts, seed=how.get("seed", 0), key=key, options=options or {}, check=prompt_of
    )
    return PromptStream(source, **how)


def texts(stream: PromptStream, first: int, count: int) -> list[str | None]:
    return [prompt.text for prompt in stream.read(first, count)]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "answer": n} for n in range(count)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


SEEDS = st.integers(-(2**70), 2**70)


@given(st.integers(1, 300), SEEDS, st.integers(0, 1000))
def test_an_order_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = [permute(index, length, seed, epoch) for index in range(length)]
    assert sorted(order) == list(range(length))


def test_orders_differ_and_mix() -> None:
    orders = {tuple(permute(i, 50, s, e) for i in range(50)) for s in range(5) for e in range(5)}
    assert len(orders) == 25
    # Each thing is anywhere with the same chance: over 2000 orders of 5, all places are near 400.
    places = [[0] * 5 for _ in range(5)]
    for seed in range(2000):
        for index in range(5):
            places[index][permute(index, 5, seed, 0)] += 1
    assert all(300 < count < 500 for row in places for count in row)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [permute(index, 10, 7, 1) for index in range(10)] == [7, 6, 5, 1, 4, 9, 8, 0, 3, 2]


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(0, 3),
    st.booleans(),
    st.none() | st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), max_size=5),
)
def test_reading_is_a_function_of_the_position(
    count: int,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    reads: list[tuple[int, int]],
) -> None:
    how = {"seed": seed, "shuffle": shuffle, "epochs": epochs}
    stream = stream_of(rows(count), **how)
    end = 48 if epochs is None else count * epochs
    whole = stream_of(rows(count), **how).read(0, end)
    assert len(whole) == end
    for first, number in reads:
        assert stream.read(first, number) == whole[first : first + number]
    for epoch in range(end // count):
        part = whole[epoch * count : (epoch + 1) * count]
        found = [prompt.text for prompt in part]
        assert sorted(map(str, found)) == sorted(row["prompt"] for row in rows(count))
        assert shuffle or found == [row["prompt"] for row in rows(count)]
    for prompt in whole:
        assert prompt.example["prompt"] == prompt.text
        assert prompt.answer == prompt.example["answer"]


def test_epochs_have_orders_of_their_own() -> None:
    stream = stream_of(rows(20), seed=1)
    assert texts(stream, 0, 20) != texts(stream, 20, 20)
    assert texts(stream, 0, 20) != texts(stream_of(rows(20), seed=2), 0, 20)


def test_a_file_is_read_by_line(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(5)]
    path = write(tmp_path / "p.jsonl", lines[0], "", *lines[1:], "  ")
    stream = stream_of(path, shuffle=False, epochs=1)
    assert texts(stream, 0, 99) == ["p0", "p1", "p2", "p3", "p4"]
    assert stream.size == 5
    assert texts(stream_of(str(path), seed=3), 0, 9) == texts(stream_of(rows(5), seed=3), 0, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p.jsonl`, line 2: not JSON: `\{`"),
        ("[1]", r"p.jsonl`, line 2: not an object: `\[1\]`. Write one object a line."),
        ('{"text": "x"}', "line 2 has no `prompt`: it has `text`. Set task.prompt_key."),
        ('{"prompt": ""}', "line 2: `prompt` is empty"),
        ('{"prompt": 3}', "line 2: neither text nor messages: `3`"),
        ('{"prompt": [{"role": "user"}]}', "line 2: a message without text"),
        ('{"prompt": ["x"]}', "line 2: not a message"),
        ("[" * 100_000, "line 2: nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "x"}', line)
    with pytest.raises(UserError, match=message):
        stream_of(path)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.prompts cannot be read: `.*nowhere.jsonl`"):
        stream_of(tmp_path / "nowhere.jsonl")
    with pytest.raises(TaskError, match=r"task.prompts cannot be read"):
        stream_of(tmp_path)
    with pytest.raises(TaskError, match=r"no prompts in .*: it is empty"):
        stream_of(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(TaskError, match=r"line 1: not JSON"):
        stream_of(tmp_path / "latin.jsonl")


def test_rows_may_be_text_or_messages() -> None:
    chat = [{"role": "user", "content": "hi"}]
    stream = stream_of(["just text", {"prompt": chat}], shuffle=False, epochs=1)
    text, messages = stream.read(0, 3)
    assert (text.text, text.messages) == ("just text", None)
    assert (messages.text, messages.messages) == (None, tuple(chat))


class FakeDataset:
    """As the datasets of Hugging Face are: a length, rows by index, a fingerprint."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"d{index}"}


def test_a_dataset_of_hugging_face() -> None:
    stream = stream_of(FakeDataset("a"), shuffle=False)
    assert texts(stream, 2, 2) == ["d2", "d0"]
    assert stream.fingerprint == stream_of(FakeDataset("a")).fingerprint
    assert stream.fingerprint != stream_of(FakeDataset("b")).fingerprint


def test_a_dataset_of_hugging_face_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, **how: Any) -> FakeDataset:
        if path == "no/such":
            raise FileNotFoundError("no such dataset")
        asked.append((path, how))
        return FakeDataset("a")

    library = ModuleType("datasets")
    library.__spec__ = ModuleSpec("datasets", None)
    vars(library)["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    stream_of("hf:some/name:test", options={"name": "main"})
    assert texts(stream_of("hf:some/name", shuffle=False), 0, 1) == ["d0"]
    assert asked == [
        ("some/name", {"split": "test", "name": "main"}),
        ("some/name", {"split": "train"}),
    ]
    with pytest.raises(TaskError, match=r"`hf:no/such` cannot be loaded: FileNotFoundError"):
        stream_of("hf:no/such")


def test_an_iterator_is_read_once_and_kept() -> None:
    taken = []

    def endless() -> Iterator[str]:
        for n in range(10**9):
            taken.append(n)
            yield f"p{n}"

    stream = stream_of(endless())
    assert texts(stream, 5, 2) == ["p5", "p6"]
    assert texts(stream, 0, 3) == ["p0", "p1", "p2"]
    assert taken == list(range(7))
    assert stream.size is None


@pytest.mark.parametrize("epochs", [1, 3, None])
def test_an_iterator_that_ends_begins_anew(epochs: int | None) -> None:
    stream = stream_of(iter(["a", "b"]), epochs=epochs)
    assert texts(stream, 0, 7) == (["a", "b"] * 4)[: min(7, 2 * (epochs or 9))]
    assert texts(stream, 6, 1) == ([] if epochs else ["a"])


def test_functions_by_name() -> None:
    by_name = stream_of("tests.tasks.samples:numbers", options={"count": 5}, shuffle=False)
    assert texts(by_name, 3, 3) == ["3?", "4?", "0?"]
    assert texts(stream_of("tests.tasks.samples:yielded", epochs=1), 0, 9) == [
        f"{n}?" for n in range(4)
    ]
    endless = stream_of("tests.tasks.samples:at", options={"base": 100}, seed=5)
    assert texts(endless, 10**6, 2) == ["5:1000100?", "5:1000101?"]
    assert texts(stream_of(samples.at, seed=5), 2, 1) == ["5:2?"]


def test_a_function_may_end_its_stream() -> None:
    def three(position: int, seed: int) -> str | None:
        return f"p{position}" if position < 3 else None

    assert texts(stream_of(three), 0, 9) == ["p0", "p1", "p2"]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("tests.tasks.samples:no_such", {}, "has no `no_such`"),
        ("tests.tasks.samples:NOT_CALLABLE", {}, "task.prompts must give rows: .* gives `3`"),
        ("tests.tasks.samples:numbers", {"size": 1}, "task.options do not suit"),
        ("tests.tasks.samples:at", {"size": 1}, "task.options do not suit"),
        ([], {}, "no prompts in the prompts"),
        (iter([]), {}, "no prompts in the prompts"),
        ([{"prompt": object()}], {}, "row 0 of the prompts .list. is not JSON"),
        ([3], {}, "row 0 of .* must be a mapping or text: `3`"),
        (["x"], {"size": 1}, "task.options are for generators"),
        ({"prompt": "x"}, {}, "task.prompts must give rows"),
    ],
)
def test_sources_that_cannot_be_used(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        stream_of(prompts, options=options)


def test_a_limit_ends_a_stream() -> None:
    assert len(stream_of(samples.at, limit=4).read(0, 9)) == 4
    assert stream_of(rows(3), limit=2, epochs=1).size == 2


def test_the_fingerprint_is_of_the_data(tmp_path: Path) -> None:
    def fingerprint(content: Any, **how: Any) -> str:
        return stream_of(content, **how).fingerprint

    path = write(tmp_path / "p.jsonl", *(json.dumps(row) for row in rows(3)))
    same = write(tmp_path / "q.jsonl", *(json.dumps(row) for row in rows(3)))
    other = write(tmp_path / "r.jsonl", *(json.dumps(row) for row in rows(4)))
    assert fingerprint(path) == fingerprint(same) != fingerprint(other)
    assert fingerprint(rows(3)) == fingerprint(rows(3), seed=9) != fingerprint(rows(4))
    changed = [*rows(2), {"prompt": "p2", "answer": 7}]
    assert fingerprint(rows(3)) != fingerprint(changed)
    assert fingerprint(samples.at) != fingerprint(samples.at, options={"base": 1})
