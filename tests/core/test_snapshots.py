"""What a part of a run remembers, saved and loaded: the same values, shared as they were."""

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.audit import RECORDS, Audit
from dora_rl.core.history import snapshots
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import JournalError
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.settings import ParadigmName, Settings
from tests.core.adversary import Adversary, stir


class Colour(Enum):
    RED = "red"
    BLUE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(slots=True, eq=False)
class Node:
    """Compared by identity: two places that hold it hold the same."""

    value: Any = None
    links: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


class Part:
    SAVED = ("content",)

    def __init__(self, content: Any = None) -> None:
        self.content = content
        self.wired = object()


KNOWN = (Colour, Point, Node, Pair)


def reloaded(content: Any) -> Any:
    """Through a file and into a part of a new process."""
    data = json.loads(json.dumps(snapshots.save({"part": Part(content)}, KNOWN)))
    part = Part()
    wired = part.wired
    snapshots.load(data, {"part": part}, KNOWN)
    assert part.wired is wired
    return part.content


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(Colour)
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.sampled_from(Colour)
values = st.recursive(
    plain | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.text(), st.integers()).map(Counter)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=20,
)


@given(values)
def test_what_was_saved_is_loaded(value: Any) -> None:
    found = reloaded(value)
    assert found == value and repr(found) == repr(value)  # repr: True is not 1, a tuple no list


@given(st.sets(st.integers()) | st.sets(st.text()))
def test_a_set_has_one_text_whatever_its_order(value: set[Any]) -> None:
    assert reloaded(value) == value
    other = Part(set())
    other.content.update(sorted(value, reverse=True))
    assert snapshots.save({"part": other}, KNOWN) == snapshots.save({"part": Part(value)}, KNOWN)


def test_what_was_shared_is_shared_and_a_circle_is_a_circle() -> None:
    a, b = Node(1), Node(2)
    a.links, b.links = [b, a], [a]
    first, second, other = reloaded([a, b, Node(1)])
    assert first.links[0] is second and first.links[1] is first and second.links == [first]
    assert other is not first and other.value == 1


def test_a_class_that_is_not_known_is_neither_saved_nor_made() -> None:
    with pytest.raises(TypeError, match="not known to a snapshot: `PosixPath`"):
        snapshots.save({"part": Part(Path())}, KNOWN)
    with pytest.raises(JournalError, match="Path"):
        snapshots.load({"part": {"content": ["Path", 0, []]}}, {"part": Part()}, KNOWN)


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"other": {"content": 1}},
        {"part": {}},
        {"part": {"content": 1, "wired": 2}},
        {"part": {"content": ["&", 0]}},
        {"part": {"content": ["Colour", "green"]}},
        {"part": {"content": ["Pair", None, [1]]}},
        {"part": {"content": ["Point", [1]]}},
        {"part": {"content": ["dict", [1]]}},
        {"part": {"content": ["bytearray", "xy"]}},
    ],
)
def test_what_does_not_fit_is_refused(data: Any) -> None:
    with pytest.raises(JournalError, match="not what this dora-rl remembers of a run"):
        snapshots.load(data, {"part": Part()}, KNOWN)


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_an_audit_continues_from_any_event(paradigm: ParadigmName) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        settings = Settings(paradigm=paradigm, groups_per_step=2, group_size=2, max_staleness=2)
        story: list[tuple[float, Event, list[Command]]] = []
        whole = Audit(settings)

        def observe(*told: Any, story: list[Any] = story, whole: Audit = whole) -> None:
            story.append(told)
            whole.observe(*told)

        world = Adversary(settings, observe)
        for instance in range(3):
            world.join(instance)
        stir(world, rng, 250, faults=True)
        at = rng.randrange(len(story))
        first, second = Audit(settings), Audit(settings)
        for told in story[:at]:
            first.observe(*told)
        data = json.loads(json.dumps(snapshots.save(first.parts(), RECORDS)))
        snapshots.load(data, second.parts(), RECORDS)
        for told in story[at:]:
            second.observe(*told)
        assert second.report() == whole.report(), f"seed {seed}, event {at}"
