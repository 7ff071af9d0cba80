"""What a model declares: its keys, their types and defaults, through unions and containers."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora_rl.config.redaction import Loc


class Key(NamedTuple):
    type: Any
    default: Any  # `...` where there is none, or a factory makes it
    fix: str | None  # json_schema_extra or metadata {"fix": "Use 0 for …"}
    elsewhere: str | None = None  # likewise: what another configuration calls the same


def keys_of(model: Any) -> dict[str, Key]:
    """The keys of a model or dataclass; empty for every other type."""
    return _class_keys(model) if isinstance(model, type) else {}


@functools.cache
def _class_keys(model: type) -> dict[str, Key]:
    if issubclass(model, BaseModel):
        return {
            field.alias or name: _model_key(field) for name, field in model.model_fields.items()
        }
    if dataclasses.is_dataclass(model):
        hints = typing.get_type_hints(model)
        return {
            field.name: Key(
                hints[field.name],
                ... if field.default is dataclasses.MISSING else field.default,
                field.metadata.get("fix"),
                field.metadata.get("elsewhere"),
            )
            for field in dataclasses.fields(model)
            if field.init
        }
    return {}


def _model_key(field: FieldInfo) -> Key:
    extra = field.json_schema_extra
    fix, elsewhere = (
        str(extra[name]) if isinstance(extra, dict) and name in extra else None
        for name in ("fix", "elsewhere")
    )
    has_default = not field.is_required() and field.default_factory is None
    return Key(field.annotation, field.default if has_default else ..., fix, elsewhere)


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type: unions taken apart, annotations and aliases removed."""
    alias = getattr(annotation, "__value__", None)  # `type X = …` of Python 3.12
    if alias is not None:
        return _members(alias)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [m for arg in typing.get_args(annotation) for m in _members(arg)]
    return [annotation]


def tables(annotation: Any, data: Any) -> list[Any]:
    """The models among the alternatives; where `data` has their tag, only those that match it."""
    models = [m for m in _members(annotation) if _is_table(m)]
    if not isinstance(data, Mapping):
        return models
    return [m for m in models if _tags_match(m, data)] or models


def _is_table(member: Any) -> bool:
    return isinstance(member, type) and (
        issubclass(member, BaseModel) or dataclasses.is_dataclass(member)
    )


def _tags_match(model: Any, data: Mapping[str, Any]) -> bool:
    return all(
        data.get(name, key.default) in typing.get_args(key.type)
        for name, key in keys_of(model).items()
        if typing.get_origin(key.type) is Literal
    )


def child(annotation: Any, data: Any, part: str | int) -> Any:
    """The type found below `part`, or Any where the types do not say."""
    for model in tables(annotation, data):
        keys = keys_of(model)
        if part in keys:
            return keys[str(part)].type
    for member in _members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if not isinstance(origin, type) or not args:
            continue
        if issubclass(origin, Mapping) and isinstance(part, str):
            return args[-1]
        if issubclass(origin, Sequence | set | frozenset) and isinstance(part, int):
            fixed = issubclass(origin, tuple) and args[-1] is not ...
            return args[min(part, len(args) - 1)] if fixed else args[0]
    return Any


def find_key(model: Any, data: Any, loc: Loc) -> Key | None:
    """The declaration of the key at `loc`."""
    if not loc:
        return None
    for part in loc[:-1]:
        model, data = child(model, data, part), value_at(data, part)
    for table in tables(model, data):
        key = keys_of(table).get(str(loc[-1]))
        if key is not None:
            return key
    return None


def value_at(data: Any, part: str | int) -> Any:
    try:
        return data[part]
    except (KeyError, IndexError, TypeError):
        return None
