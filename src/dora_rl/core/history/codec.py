"""Objects of the core to and from what JSON can hold, exactly.

Invariants: `decode(T, encode(x)) == x` for every type of the core, also after a pass through
JSON; floats, ints and the order of dicts survive; whatever does not fit a type is refused with
the place where it stands. A dataclass becomes an object by field name, a NamedTuple a list, a
dict an object where its keys are strings and else a list of pairs, a set a sorted list, a union
of dataclasses `[name, object]`. Fields that earlier releases did not have (`types.ADDED`) are left
out at their defaults. Fields with `metadata={"derived": True}` are left out, and left
to their defaults: whoever owns the object rebuilds them. Events and commands have a short form
of their own, `[name, *fields]`.

It must not know files, nor what any type means.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_type_hints, overload

from dora_rl.core.history.codec_types import (
    Convert,
    Misfit,
    added,
    decoder,
    encode_by_value,
    encoder,
    shown,
    signatures,
)
from dora_rl.core.protocol import commands, events
from dora_rl.core.protocol.errors import JournalError

T = TypeVar("T")

dumps: Callable[[Any], str] = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, ensure_ascii=True, check_circular=False
).encode
"""Canonical JSON: the same object gives the same bytes."""


def encode(obj: object, hint: Any = None) -> Any:
    """`obj` as JSON can hold it; `hint` is its type, where `type(obj)` does not say it all."""
    return encode_by_value(obj) if hint is None else encoder(hint)(obj)


@overload
def decode(hint: type[T], data: Any) -> T: ...
@overload
def decode(hint: Any, data: Any) -> Any: ...
def decode(hint: Any, data: Any) -> Any:
    """What `encode` made `data` from; JournalError where it does not fit `hint`."""
    try:
        return decoder(hint)(data)
    except Misfit as misfit:
        root = getattr(hint, "__name__", str(hint))
        raise JournalError(f"{misfit.place(root)}: {misfit}") from None


def encode_event(event: events.Event) -> list[Any]:
    """`["TrajectoryFinished", 12, 7, 100, [[0, "v0", 100]]]`, once written as JSON."""
    return _EVENTS.encode(event)


def decode_event(data: Any) -> events.Event:
    return cast(events.Event, _EVENTS.decode(data))


def encode_command(command: commands.Command) -> list[Any]:
    return _COMMANDS.encode(command)


def decode_command(data: Any) -> commands.Command:
    return cast(commands.Command, _COMMANDS.decode(data))


class _Messages:
    """The classes of one union, each to and from `[name, *fields]`."""

    def __init__(self, kind: str, union: Any) -> None:
        self._kind = kind
        classes = get_args(union)
        self._encoders = {cls: _message_encoder(cls) for cls in classes}
        self._decoders = {cls.__name__: _message_decoder(cls) for cls in classes}

    def encode(self, message: object) -> list[Any]:
        convert = self._encoders.get(type(message))
        if convert is None:
            raise JournalError(f"not {self._kind}: `{type(message).__name__}`")
        return convert(message)

    def decode(self, data: Any) -> Any:
        if type(data) is not list or not data:
            raise JournalError(
                f"{self._kind} must be a list that begins with a name: {shown(data)}"
            )
        name = data[0]
        convert = self._decoders.get(name) if type(name) is str else None
        if convert is None:
            raise JournalError(
                f"unknown name of {self._kind}: {shown(name)}. Was it written by a newer dora-rl?"
            )
        try:
            return convert(data)
        except Misfit as misfit:
            raise JournalError(f"{misfit.place(name)}: {misfit}") from None


def _message_encoder(cls: type) -> Callable[[Any], list[Any]]:
    # Their fields are scalars, and tuples of NamedTuples, which JSON writes as lists by itself.
    name = cls.__name__
    names = [field.name for field in fields(cls)]
    if not names:
        return lambda message: [name]
    get = attrgetter(*names)
    if len(names) == 1:
        return lambda message: [name, get(message)]
    new = added(cls)
    if new:
        return lambda message: [name, *_without_defaults(get(message), tuple(new.values()))]
    return lambda message: [name, *get(message)]


def _without_defaults(values: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of a message, less those at its end that are new and at their defaults."""
    kept = len(values)
    for default in reversed(defaults):
        if values[kept - 1] != default:
            break
        kept -= 1
    return values[:kept]


def _message_decoder(cls: type) -> Convert:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    parts = [decoder(hints[name]) for name in names]
    size = len(names) + 1
    least = size - len(added(cls))
    plain = signatures([str, *(hints[name] for name in names)])

    def decode_message(data: list[Any]) -> Any:
        if tuple(map(type, data)) in plain:
            return cls(*data[1:])
        if not least <= len(data) <= size:
            raise Misfit(f"expected {size - 1} fields, got {len(data) - 1}")
        arguments: list[Any] = []
        try:
            for part, value in zip(parts, data[1:], strict=False):  # new fields may be missing
                arguments.append(part(value))
        except Misfit as misfit:
            misfit.path.append(names[len(arguments)])
            raise
        return cls(*arguments)

    return decode_message


_EVENTS = _Messages("an event", events.Event)
_COMMANDS = _Messages("a command", commands.Command)
