"""One pair of closures per type: to what JSON can hold, and strictly back.

They are made when a type is first met and kept, so that a million small records are bearable.
It must not know events, commands nor files: `codec` is its face.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import product
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from dora_rl.core.protocol.errors import DoraError

Convert: TypeAlias = Callable[[Any], Any]


class Misfit(Exception):
    """Data that does not fit its type; `path` grows from the inside out."""

    def __init__(self, problem: str, *path: object) -> None:
        super().__init__(problem)
        self.path = list(path)

    def place(self, root: str) -> str:
        steps = (f".{step}" if isinstance(step, str) else f"[{step}]" for step in self.path[::-1])
        return root + "".join(steps)


def shown(data: object) -> str:
    """A value as a message quotes it."""
    text = repr(data)
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


_ENCODERS: dict[Any, Convert] = {}
_DECODERS: dict[Any, Convert] = {}


def encoder(hint: Any) -> Convert:
    found = _ENCODERS.get(hint)
    if found is None:
        found = _ENCODERS[hint] = _build(hint, _Encoders)
    return found


def decoder(hint: Any) -> Convert:
    found = _DECODERS.get(hint)
    if found is None:
        found = _DECODERS[hint] = _build(hint, _Decoders)
    return found


def _build(hint: Any, builders: "type[_Encoders] | type[_Decoders]") -> Convert:
    """One closure per type, made when the type is first met."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint in _SCALARS:
        return builders.scalar(hint)
    if origin in (Union, UnionType):
        return builders.union(arguments)
    if isinstance(hint, type) and origin is None:
        if is_dataclass(hint):
            return builders.dataclass(hint)
        if issubclass(hint, Enum):
            return builders.enum(hint)
        if issubclass(hint, tuple) and hasattr(hint, "_fields"):
            named: Any = hint
            hints = get_type_hints(named)
            each = tuple(hints[name] for name in named._fields)
            return builders.fixed(named._make, each, named._fields)
    if origin is dict:
        return builders.mapping(dict, *arguments)
    if origin is Counter:
        return builders.mapping(Counter, arguments[0], int)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return builders.fixed(tuple, arguments, tuple(range(len(arguments))))
    if origin in (list, deque, tuple):
        return builders.sequence(origin, arguments[0])
    if origin in (set, frozenset):
        return builders.unordered(origin, arguments[0])
    raise TypeError(f"the codec has no form for the type `{hint}`")


_SCALARS: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),  # an int where a float is meant stays an int
    str: (str,),
    bool: (bool,),
    NoneType: (NoneType,),
}


def signatures(hints: Iterable[Any]) -> frozenset[tuple[type, ...]]:
    """All types that a row of scalars may have, to be checked at once; empty if one is none."""
    columns = []
    for hint in hints:
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not all(member in _SCALARS for member in members):
            return frozenset()
        columns.append([cls for member in members for cls in _SCALARS[member]])
    return frozenset(product(*columns))


def _is_text(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, str)


def _stored(cls: Any) -> Iterator[Any]:
    return (field for field in fields(cls) if not field.metadata.get("derived"))


def added(cls: Any) -> dict[str, Any]:
    """The fields that earlier releases did not have, with their defaults."""
    return {f.name: f.default for f in fields(cls) if f.metadata.get("added")}


def _same(value: Any) -> Any:
    return value


class _Encoders:
    """Closures from objects; they trust the types, which mypy has checked."""

    @staticmethod
    def scalar(hint: Any) -> Convert:
        return _same

    @staticmethod
    def enum(cls: Any) -> Convert:
        return attrgetter("value")

    @staticmethod
    def union(members: tuple[Any, ...]) -> Convert:
        concrete = [member for member in members if member is not NoneType]
        if len(concrete) == 1:
            inner = encoder(concrete[0])
            return lambda value: None if value is None else inner(value)
        if all(member in _SCALARS for member in concrete):
            return _same
        by_class = {cls: encoder(cls) for cls in _tagged(concrete)}
        return lambda value: (
            None if value is None else [type(value).__name__, by_class[type(value)](value)]
        )

    @staticmethod
    def dataclass(cls: Any) -> Convert:
        parts: list[tuple[str, Convert]] = []  # filled at first use: a class may contain itself
        new = added(cls)

        def encode_fields(value: Any) -> dict[str, Any]:
            if not parts:
                hints = get_type_hints(cls)
                parts.extend((f.name, encoder(hints[f.name])) for f in _stored(cls))
            if not new:
                return {name: part(getattr(value, name)) for name, part in parts}
            return {
                name: part(getattr(value, name))
                for name, part in parts
                if name not in new or getattr(value, name) != new[name]
            }

        return encode_fields

    @staticmethod
    def fixed(make: Any, hints: tuple[Any, ...], names: tuple[Any, ...]) -> Convert:
        parts = [encoder(hint) for hint in hints]
        if all(part is _same for part in parts):
            return list
        return lambda value: [part(item) for part, item in zip(parts, value, strict=True)]

    @staticmethod
    def sequence(cls: Any, hint: Any) -> Convert:
        part = encoder(hint)
        return list if part is _same else lambda value: [part(item) for item in value]

    @staticmethod
    def unordered(cls: Any, hint: Any) -> Convert:
        part = encoder(hint)
        return lambda value: sorted(part(item) for item in value)

    @staticmethod
    def mapping(cls: Any, key_hint: Any, value_hint: Any) -> Convert:
        key, part = encoder(key_hint), encoder(value_hint)
        if _is_text(key_hint):
            return lambda value: {key(k): part(v) for k, v in value.items()}
        return lambda value: [[key(k), part(v)] for k, v in value.items()]


def _tagged(members: list[Any]) -> list[Any]:
    if not all(is_dataclass(member) for member in members):
        raise TypeError(f"the codec cannot tell apart the union of {members}")
    return members


def encode_by_value(value: Any) -> Any:
    """Encode by what the value is: the same form as by its type, except of an empty dict."""
    cls = type(value)
    if cls in _SCALARS:
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {encode_by_value(key): encode_by_value(item) for key, item in value.items()}
        return [[encode_by_value(key), encode_by_value(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(encode_by_value(item) for item in value)
    if isinstance(value, list | deque) or cls is tuple:
        return [encode_by_value(item) for item in value]
    return encoder(cls)(value)


class _Decoders:
    """Closures from data, each strict; a `Misfit` collects the place on its way out."""

    @staticmethod
    def scalar(hint: Any) -> Convert:
        accepted = _SCALARS[hint]
        name = "null" if hint is NoneType else hint.__name__
        if len(accepted) == 1:
            (only,) = accepted

            def decode_one(data: Any) -> Any:
                if type(data) is not only:  # not isinstance: a bool is no int
                    raise Misfit(f"expected {name}, got {shown(data)}")
                return data

            return decode_one

        def decode_scalar(data: Any) -> Any:
            if type(data) not in accepted:
                raise Misfit(f"expected {name}, got {shown(data)}")
            return data

        return decode_scalar

    @staticmethod
    def enum(cls: Any) -> Convert:
        by_value = {member.value: member for member in cls}

        def decode_enum(data: Any) -> Any:
            found = by_value.get(data) if type(data) in (str, int) else None
            if found is None:
                known = ", ".join(f"`{value}`" for value in by_value)
                raise Misfit(f"expected one of {known}, got {shown(data)}")
            return found

        return decode_enum

    @staticmethod
    def union(members: tuple[Any, ...]) -> Convert:
        concrete = [member for member in members if member is not NoneType]
        nullable = len(concrete) < len(members)
        if len(concrete) == 1:
            inner = decoder(concrete[0])
            return lambda data: None if data is None else inner(data)
        if all(member in _SCALARS for member in concrete):
            accepted = {cls for member in members for cls in _SCALARS[member]}
            names = " or ".join(member.__name__ for member in members)

            def decode_any(data: Any) -> Any:
                if type(data) not in accepted:
                    raise Misfit(f"expected {names}, got {shown(data)}")
                return data

            return decode_any
        by_name = {cls.__name__: decoder(cls) for cls in _tagged(concrete)}

        def decode_tagged(data: Any) -> Any:
            if data is None and nullable:
                return None
            if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
                raise Misfit(f"expected [name, fields], got {shown(data)}")
            found = by_name.get(data[0])
            if found is None:
                raise Misfit(f"unknown name: {shown(data[0])}")
            return found(data[1])

        return decode_tagged

    @staticmethod
    def dataclass(cls: Any) -> Convert:
        parts: dict[str, Convert] = {}
        late: list[str] = []
        new = added(cls)

        def decode_fields(data: Any) -> Any:
            if not parts:
                hints = get_type_hints(cls)
                late.extend(f.name for f in _stored(cls) if not f.init)
                parts.update((f.name, decoder(hints[f.name])) for f in _stored(cls))
            if type(data) is not dict:
                raise Misfit(f"expected an object, got {shown(data)}")
            if data.keys() != parts.keys() and not (
                parts.keys() - new.keys() <= data.keys() <= parts.keys()
            ):
                raise Misfit(_unlike(parts, data))
            values = {}
            for name, part in parts.items():
                if name not in data:
                    continue  # one that was added since, at its default
                try:
                    values[name] = part(data[name])
                except Misfit as misfit:
                    misfit.path.append(name)
                    raise
            set_late = [(name, values.pop(name)) for name in late]
            try:
                made = cls(**values)
            except DoraError as error:  # the class checks its own values
                raise Misfit(str(error)) from None
            for name, value in set_late:
                object.__setattr__(made, name, value)
            return made

        return decode_fields

    @staticmethod
    def fixed(make: Any, hints: tuple[Any, ...], names: tuple[Any, ...]) -> Convert:
        parts = [decoder(hint) for hint in hints]
        size = len(parts)
        plain = signatures(hints)

        def decode_fixed(data: Any) -> Any:
            if type(data) is not list or len(data) != size:
                raise Misfit(f"expected a list of {size}, got {shown(data)}")
            if tuple(map(type, data)) in plain:
                return make(data)
            values: list[Any] = []
            try:
                for part, item in zip(parts, data, strict=True):
                    values.append(part(item))
            except Misfit as misfit:
                misfit.path.append(names[len(values)])
                raise
            return make(values)

        return decode_fixed

    @staticmethod
    def sequence(cls: Any, hint: Any) -> Convert:
        part = decoder(hint)

        def decode_items(data: Any) -> Any:
            if type(data) is not list:
                raise Misfit(f"expected a list, got {shown(data)}")
            values: list[Any] = []
            try:
                for item in data:
                    values.append(part(item))
            except Misfit as misfit:
                misfit.path.append(len(values))
                raise
            return values if cls is list else cls(values)

        return decode_items

    @staticmethod
    def unordered(cls: Any, hint: Any) -> Convert:
        items = _Decoders.sequence(list, hint)

        def decode_set(data: Any) -> Any:
            values = items(data)
            made = cls(values)
            if len(made) != len(values):
                raise Misfit("an element stands twice in a set")
            return made

        return decode_set

    @staticmethod
    def mapping(cls: Any, key_hint: Any, value_hint: Any) -> Convert:
        key, part = decoder(key_hint), decoder(value_hint)
        text_keys = _is_text(key_hint)
        wanted = "an object" if text_keys else "a list of pairs"

        def decode_mapping(data: Any) -> Any:
            if text_keys and type(data) is dict:
                pairs = list(data.items())
            elif not text_keys and type(data) is list:
                pairs = data
            elif data == {}:  # an empty dict encoded without its type
                pairs = []
            else:
                raise Misfit(f"expected {wanted}, got {shown(data)}")
            made = cls()
            for position, pair in enumerate(pairs):
                if type(pair) not in (list, tuple) or len(pair) != 2:
                    raise Misfit(f"expected a pair, got {shown(pair)}", position)
                try:
                    made[key(pair[0])] = part(pair[1])
                except Misfit as misfit:
                    misfit.path.append(pair[0] if text_keys else position)
                    raise
            if len(made) != len(pairs):
                raise Misfit("a key stands twice")
            return made

        return decode_mapping


def _unlike(wanted: dict[str, Convert], data: dict[Any, Any]) -> str:
    missing = ", ".join(f"`{name}`" for name in wanted if name not in data)
    extra = ", ".join(f"`{name}`" for name in data if name not in wanted)
    found = (("missing fields: ", missing), ("unknown fields: ", extra))
    return "; ".join(label + names for label, names in found if names)
