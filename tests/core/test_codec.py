"""The codec: exact both ways, and strict on the way back."""

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.history.codec import (
    decode,
    decode_command,
    decode_event,
    dumps,
    encode,
    encode_command,
    encode_event,
)
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.errors import JournalError
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.protocol.types import BatchGroup, Segment


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Leaf:
    name: str
    weight: float = 0.5


@dataclass
class Fruit:
    size: int


@dataclass
class Everything:
    number: int
    share: float
    maybe: int | None
    either: int | str
    colour: Colour
    point: Point
    leaves: list[Leaf]
    pair: tuple[int, str]
    many: tuple[Point, ...]
    by_id: dict[int, Leaf]
    by_colour: dict[Colour, int]
    by_name: dict[str, list[int]]
    by_pair: dict[tuple[int, int], bool]
    numbers: set[int]
    names: frozenset[str]
    queue: deque[int]
    counts: Counter[str]
    grown: Leaf | Fruit | None
    child: "Everything | None" = None
    index: dict[int, int] = field(default_factory=dict, metadata={"derived": True})


def something(**changes: Any) -> Everything:
    values: dict[str, Any] = {
        "number": 1 << 70,
        "share": 0.1,
        "maybe": None,
        "either": "x",
        "colour": Colour.BLUE,
        "point": Point(1, 2.5),
        "leaves": [Leaf("a"), Leaf("b", 1e-300)],
        "pair": (1, "one"),
        "many": (Point(0, 0.0), Point(-1, 3.0)),
        "by_id": {7: Leaf("seven"), 2: Leaf("two")},
        "by_colour": {Colour.RED: 1},
        "by_name": {"z": [1], "a": []},
        "by_pair": {(2, 1): True},
        "numbers": {30, 4, 200},
        "names": frozenset({"q", "p"}),
        "queue": deque([3, 1, 2]),
        "counts": Counter({"t": 3}),
        "grown": Fruit(3),
    }
    return Everything(**{**values, **changes})


def through_json(hint: Any, value: Any) -> Any:
    return decode(hint, json.loads(dumps(encode(value, hint))))


def test_every_kind_of_value_comes_back_as_it_was() -> None:
    value = something(child=something(maybe=3, either=4, grown=Leaf("leaf")))
    back = through_json(Everything, value)
    assert back == value
    assert type(back.queue) is deque
    assert type(back.counts) is Counter
    assert type(back.names) is frozenset
    assert type(back.point) is Point
    assert type(back.grown) is Fruit


def test_the_order_of_dicts_is_kept_and_sets_are_sorted() -> None:
    value = something()
    assert list(through_json(Everything, value).by_id) == [7, 2]
    assert list(through_json(Everything, value).by_name) == ["z", "a"]
    assert encode(value)["numbers"] == [4, 30, 200]


def test_encoding_by_value_and_by_type_agree() -> None:
    value = something()
    assert encode(value) == encode(value, Everything)
    assert encode(value.by_id) == encode(value.by_id, dict[int, Leaf])
    assert encode({Colour.RED: {3, 1}}) == {"red": [1, 3]}
    assert encode([deque([Point(1, 2.0)]), (True, None)]) == [[[1, 2.0]], [True, None]]
    assert decode(dict[int, Leaf], encode({})) == {}


def test_derived_fields_are_left_out_and_left_to_their_default() -> None:
    value = something()
    value.index[1] = 2
    assert "index" not in encode(value)
    assert through_json(Everything, value).index == {}


def test_a_field_without_init_is_restored() -> None:
    @dataclass
    class Late:
        name: str
        calls: int = field(default=0, init=False)

    value = Late("x")
    value.calls = 5
    assert through_json(Late, value) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    back = through_json(float, number)
    assert (type(back), repr(back)) == (float, repr(number))


@given(st.integers())
def test_ints_stay_ints_even_where_a_float_is_meant(number: int) -> None:
    back = through_json(float, number)
    assert (type(back), back) == (int, number)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"number": 1.0}, "Everything.number: expected int, got `1.0`"),
        ({"number": True}, "Everything.number: expected int, got `True`"),
        ({"share": "0.1"}, "Everything.share: expected float"),
        ({"maybe": "3"}, "Everything.maybe: expected int"),
        ({"either": None}, "Everything.either: expected int or str"),
        ({"colour": "green"}, "Everything.colour: expected one of `red`, `blue`"),
        ({"colour": ["red"]}, "Everything.colour: expected one of `red`, `blue`"),
        ({"point": [1]}, "Everything.point: expected a list of 2"),
        ({"point": [1, "y"]}, "Everything.point.y: expected float"),
        ({"leaves": [{"name": "a"}]}, "Everything.leaves[0]: missing fields: `weight`"),
        ({"leaves": {}}, "Everything.leaves: expected a list"),
        ({"leaves": [3]}, "Everything.leaves[0]: expected an object"),
        ({"many": [[0, 0.0], [1.5, 1.0]]}, "Everything.many[1].x: expected int"),
        ({"pair": [1, 2]}, "Everything.pair[1]: expected str"),
        ({"by_id": {"7": {}}}, "Everything.by_id: expected a list of pairs"),
        ({"by_id": [[7]]}, "Everything.by_id[0]: expected a pair"),
        ({"by_id": [["7", {"name": "", "weight": 1}]]}, "Everything.by_id[0]: expected int"),
        ({"by_name": [["z", [1]]]}, "Everything.by_name: expected an object"),
        ({"by_name": {"z": ["1"]}}, "Everything.by_name.z[0]: expected int"),
        ({"by_pair": [[[2, 1], True], [[2, 1], True]]}, "Everything.by_pair: a key stands twice"),
        ({"numbers": [1, 1]}, "Everything.numbers: an element stands twice"),
        ({"grown": ["Stone", {}]}, "Everything.grown: unknown name: `'Stone'`"),
        ({"grown": {"size": 3}}, "Everything.grown: expected [name, fields]"),
        ({"grown": ["Fruit", {"size": None}]}, "Everything.grown.size: expected int"),
        ({"surplus": 1}, "Everything: unknown fields: `surplus`"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(changes: Any, place: str) -> None:
    with pytest.raises(JournalError) as caught:
        decode(Everything, {**encode(something()), **changes})
    assert str(caught.value).startswith(place)


def test_a_value_that_its_class_refuses_is_refused() -> None:
    data = {**encode(Settings()), "max_staleness": -1}
    with pytest.raises(JournalError, match="Settings: max_staleness must be >= 0"):
        decode(Settings, data)


def test_settings_round_trip() -> None:
    settings = Settings(paradigm=ParadigmName.PARTIAL, max_staleness=7, kv_pressure=0.3)
    assert through_json(Settings, settings) == settings


@pytest.mark.parametrize("hint", [object, list[object], int | list[int], dict])
def test_a_type_without_a_form_is_an_error_of_the_program(hint: Any) -> None:
    with pytest.raises(TypeError, match="codec"):
        decode(hint, [])


# Events and commands

events = st.one_of([st.from_type(cls) for cls in get_args(e.Event)])
commands = st.one_of([st.from_type(cls) for cls in get_args(c.Command)])


@given(events)
def test_every_event_round_trips(event: e.Event) -> None:
    assert decode_event(json.loads(dumps(encode_event(event)))) == event


@given(commands.filter(lambda command: dumps_or_none(command) is not None))
def test_every_command_round_trips(command: c.Command) -> None:
    back = decode_command(json.loads(dumps(encode_command(command))))
    assert back == command
    assert dumps(encode_command(back)) == dumps(encode_command(command))


def dumps_or_none(command: c.Command) -> str | None:
    """JSON has no name for an infinite time."""
    try:
        return dumps(encode_command(command))
    except ValueError:
        return None


def test_the_short_form() -> None:
    event = e.TrajectoryFinished(12, 7, 100, (Segment(0, "v0", 100),))
    assert dumps(encode_event(event)) == '["TrajectoryFinished",12,7,100,[[0,"v0",100]]]'
    assert dumps(encode_event(e.TimerFired())) == '["TimerFired"]'
    assert dumps(encode_event(e.BatchTrained(3))) == '["BatchTrained",3]'
    train = c.Train(3, (BatchGroup(5, 2, (10, 11)),))
    assert dumps(encode_command(train)) == '["Train",3,[[5,2,[10,11]]]]'


def test_decoded_messages_have_their_own_types() -> None:
    event = decode_event(["TrajectoryFinished", 12, 7, 100, [[0, "v0", 100]]])
    assert isinstance(event, e.TrajectoryFinished)
    assert type(event.segments) is tuple
    assert type(event.segments[0]) is Segment


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (["Vanished", 1], "unknown name of an event: `'Vanished'`"),
        (["Train", 1, []], "unknown name of an event"),
        ([["TimerFired"]], "unknown name of an event"),
        ([], "must be a list that begins with a name"),
        ("TimerFired", "must be a list that begins with a name"),
        (["BatchTrained"], "BatchTrained: expected 1 fields, got 0"),
        (["BatchTrained", 1, 2], "BatchTrained: expected 1 fields, got 2"),
        (["BatchTrained", True], "BatchTrained.step: expected int"),
        (["GroupJudged", 1, 2], "GroupJudged.filtered: expected str"),
        (["TrajectoryFinished", 1, 1, 1, [[0, "d"]]], "TrajectoryFinished.segments[0]"),
        (["TrajectoryFinished", 1, 1, 1, [[0, 1, 1]]], "TrajectoryFinished.segments[0].digest"),
    ],
)
def test_a_strange_event_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(JournalError) as caught:
        decode_event(data)
    assert problem in str(caught.value)


def test_a_command_is_no_event() -> None:
    with pytest.raises(JournalError, match="not an event: `Delete`"):
        encode_event(c.Delete(1))  # type: ignore[arg-type]


# Fields that earlier releases did not have


def test_what_does_not_use_a_new_field_is_written_as_before() -> None:
    assert encode_event(e.InstanceJoined(1, 0, 8, 1000)) == ["InstanceJoined", 1, 0, 8, 1000, 1]
    assert encode_event(e.InstanceJoined(1, 0, 8, 1000, elastic=True))[-2:] == [1, True]
    assert encode_event(e.InstanceJoined(1, 0, 8, 1000, lendable=False))[-2:] == [False, False]
    assert "elastic" not in encode(Settings())
    assert encode(Settings(elastic="both"))["elastic"] == "both"


def test_what_was_written_without_a_new_field_has_its_default() -> None:
    assert decode_event(["InstanceJoined", 1, 0, 8, 1000, 1]) == e.InstanceJoined(1, 0, 8, 1000)
    with pytest.raises(JournalError, match="expected 7 fields, got 4"):
        decode_event(["InstanceJoined", 1, 0, 8, 1000])
    old = encode(Settings(group_size=3))
    assert decode(Settings, old) == Settings(group_size=3)
    with pytest.raises(JournalError, match="missing fields: `group_size`"):
        decode(Settings, {key: value for key, value in old.items() if key != "group_size"})
