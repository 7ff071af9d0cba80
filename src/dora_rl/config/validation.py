"""Plain data into models, strictly."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dora_rl.config.messages import summary
from dora_rl.config.text import file_name
from dora_rl.config.unknown import refuse_unknown_keys
from dora_rl.core.protocol.errors import UserError

T = TypeVar("T")


class ConfigModel(BaseModel):
    """Base of configuration sections: immutable, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def validate(model: type[T], data: Mapping[str, Any], source: str | Path) -> T:
    """Build `model` (a pydantic model or a dataclass, nested at will) from plain data.

    `source` names where a missing key has to be added. Types are strict: no number from a
    string, no integer from a bool. A message that a model's own check raises should be
    complete, start with the key, and not know its section: the section is added here.
    """
    try:
        return _validated(model, data, source)
    except RecursionError:  # wherever it was, also while an error was put into words
        raise UserError(f"nested too deeply: {file_name(source)}. Flatten its tables.") from None


def _validated(model: type[T], data: Mapping[str, Any], source: str | Path) -> T:
    refuse_unknown_keys(model, model, data, ())
    # JSON mode, because strict there still means: enums and literals from strings, tuples
    # from arrays, dataclasses from tables. In Python mode strict refuses all of these.
    text = json.dumps(data, default=lambda moment: moment.isoformat())
    try:
        return TypeAdapter(model).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid" and "recursion limit" in first["msg"]:
            raise RecursionError from None  # pydantic's limit is lower than ours
        raise UserError(summary(error, model, data, source)) from None
