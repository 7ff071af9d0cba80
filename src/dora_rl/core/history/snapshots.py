"""What parts of a run remember, to and from what JSON can hold, with objects shared as they were.

A part is an object that a new process makes and wires up again: its class names in `SAVED` the
attributes that are history, and in `WIRED` those that it is given. What it remembers is plain
data, enums, tuples, dataclasses and records: classes that are known here by being listed.

    data = save({"audit": audit}, KNOWN)      # JSON-able
    load(data, {"audit": Audit(settings)}, KNOWN)   # remembers what the first one did

After `load` each part continues exactly as the saved one. Only listed classes are ever made, by
`__new__`: nothing in the data is run. The codec of the core's own state is `codec`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any

from dora_rl.core.protocol.errors import JournalError

_PLAIN = frozenset({NoneType, bool, int, float, str})
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "deque": deque,
}
_MAPPINGS: dict[str, Callable[[], Any]] = {"dict": dict, "Counter": Counter}
_BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def save(parts: Mapping[str, object], known: Iterable[type]) -> dict[str, Any]:
    """What each part remembers; TypeError for a class that is not among the `known`."""
    writer = _Writer(known)
    return {name: _attributes(part, writer.encode) for name, part in parts.items()}


def load(data: Any, parts: Mapping[str, object], known: Iterable[type]) -> None:
    """Give each part what `save` made of its like; JournalError where it does not fit."""
    reader = _Reader(known)
    try:
        if data.keys() != parts.keys():
            raise ValueError(f"it holds {sorted(data)}, not {sorted(parts)}")
        for name, part in parts.items():
            saved = names_of(type(part))
            if data[name].keys() != set(saved):
                raise ValueError(f"`{name}` has other attributes")
            for attribute in saved:
                object.__setattr__(part, attribute, reader.decode(data[name][attribute]))
    except _BROKEN as error:
        raise JournalError(f"not what this dora-rl remembers of a run: {error}") from None


def names_of(cls: type) -> tuple[str, ...]:
    """The attributes of a class that are saved, in an order that does not change."""
    saved = getattr(cls, "SAVED", None)
    if saved is not None:
        return tuple(saved)
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    return tuple(getattr(cls, "__slots__", ()))


def _attributes(part: object, encode: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: encode(getattr(part, name)) for name in names_of(type(part))}


def _by_name(known: Iterable[type]) -> dict[str, type]:
    classes = list(known)
    named = {cls.__name__: cls for cls in classes}
    assert len(named) == len(set(classes)), "two classes of one name cannot be told apart"
    return named


class _Writer:
    def __init__(self, known: Iterable[type]) -> None:
        self._known = set(_by_name(known).values())
        self._encoders: dict[type, Callable[[Any], Any]] = {}
        self._numbers: dict[object, int] = {}  # of the records met

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        found = self._encoders.get(kind)
        if found is None:
            found = self._encoders[kind] = self._encoder(kind)
        return found(value)

    def _encoder(self, kind: type) -> Callable[[Any], Any]:
        encode, name = self.encode, kind.__name__
        if kind in (list, tuple, deque):
            return lambda value: [name, [encode(item) for item in value]]
        if kind is set:
            return lambda value: [name, [encode(item) for item in sorted(value)]]
        if kind in (dict, Counter):
            return lambda value: [name, [[encode(k), encode(v)] for k, v in value.items()]]
        if kind is bytearray:
            return lambda value: [name, value.hex()]
        if kind not in self._known:
            raise TypeError(f"not known to a snapshot: `{name}`")
        if issubclass(kind, Enum):
            return lambda value: [name, value.value]
        if issubclass(kind, tuple):
            return lambda value: [name, [encode(item) for item in value]]
        return self._record_encoder(kind)

    def _record_encoder(self, kind: type) -> Callable[[Any], Any]:
        """What is compared by identity is written where it is met first, then named by number."""
        encode, name, numbers, names = self.encode, kind.__name__, self._numbers, names_of(kind)
        get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)

        def encode_value(value: Any) -> Any:
            return [name, None, [encode(item) for item in get(value)]]

        def encode_record(value: Any) -> Any:
            number = numbers.get(value)
            if number is not None:
                return ["&", number]
            number = numbers[value] = len(numbers)
            return [name, number, [encode(item) for item in get(value)]]

        by_identity = getattr(kind, "__hash__", None) is object.__hash__
        return encode_record if by_identity else encode_value


class _Reader:
    def __init__(self, known: Iterable[type]) -> None:
        self._known = _by_name(known)
        self._records: dict[int, Any] = {}

    def decode(self, data: Any) -> Any:
        if type(data) is not list:
            return data
        name, decode = data[0], self.decode
        if name == "&":
            return self._records[data[1]]
        if name in _SEQUENCES:
            return _SEQUENCES[name]([decode(item) for item in data[1]])
        if name in _MAPPINGS:
            made = _MAPPINGS[name]()
            for key, value in data[1]:
                made[decode(key)] = decode(value)
            return made
        if name == "bytearray":
            return bytearray.fromhex(data[1])
        kind: Any = self._known[name]
        if issubclass(kind, Enum):
            return kind(data[1])
        if issubclass(kind, tuple):
            return kind(*[decode(item) for item in data[1]])
        record = object.__new__(kind)
        if data[1] is not None:
            self._records[data[1]] = record
        for attribute, value in zip(names_of(kind), data[2], strict=True):
            object.__setattr__(record, attribute, decode(value))
        return record
