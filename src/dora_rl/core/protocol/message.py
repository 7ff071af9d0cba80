"""How events and commands are declared: read-only to the type checker, cheap to make.

A frozen dataclass stores each field through `object.__setattr__`, which makes it four times as
slow to construct, and every event makes some. Nothing but a constructor may assign to a field of
a message; mypy refuses it everywhere, the interpreter does not look.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make a class of fields a message: with slots, equal and hashed by type and fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
