"""What pydantic found wrong, in one line of the user's words."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dora_rl.config.redaction import REDACTED, Loc, concealed, scrubbed
from dora_rl.config.shape import Key, find_key, value_at
from dora_rl.config.text import dotted, file_name, one_line, show
from dora_rl.config.unknown import absent

# What a value must be, by pydantic's name of the error; braces are filled from its context.
_MUST_BE = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "list_type": "an array",
    "tuple_type": "an array",
    "set_type": "an array",
    "frozen_set_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "dataclass_type": "a table",
    "dataclass_exact_type": "a table",
    "none_required": "absent",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "of length >= {min_length}",
    "too_long": "of length <= {max_length}",
    "string_too_short": "of length >= {min_length}",
    "string_too_long": "of length <= {max_length}",
    "string_pattern_mismatch": "text that matches {pattern}",
}
_CHOICES = ("literal_error", "enum", "union_tag_invalid")


def summary(error: ValidationError, model: Any, data: Mapping[str, Any], source: str | Path) -> str:
    """The first wrong key in full; further ones by name."""
    problems: dict[Loc, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        problems.setdefault(_user_loc(detail, data), []).append(detail)
    (loc, details), *others = problems.items()
    text = _message(loc, details, model, data, source)
    if others:
        text += f" Also wrong: {', '.join(f'`{dotted(other)}`' for other, _ in others)}."
    return scrubbed(text, data)  # a model's own check may have quoted what is not to be shown


def _user_loc(detail: ErrorDetails, data: Any) -> Loc:
    """Where the error is in the user's words: without the parts that name union members."""
    loc: list[str | int] = []
    for part in detail["loc"]:
        inside = isinstance(data, Mapping) and part in data
        if inside or (isinstance(data, list) and isinstance(part, int)):
            loc.append(part)
            data = value_at(data, part)
    if detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        loc.append(detail["loc"][-1])
    elif detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        loc.append(str(detail["ctx"]["discriminator"]).strip("'"))
    return tuple(loc)


def _message(
    loc: Loc, details: list[ErrorDetails], model: Any, data: Any, source: str | Path
) -> str:
    name = dotted(loc)
    # A union reports every member that did not fit; one that objects in words of its own, or
    # misses a key, was the intended one.
    own = next((d for d in details if d["type"] in ("value_error", "assertion_error")), None)
    if own is not None:
        return _with_section(loc, one_line(own["ctx"]["error"]), model, data)
    if any("missing" in d["type"] or d["type"] == "union_tag_not_found" for d in details):
        return f"{name} is missing. Add it to {file_name(source)}, or pass --set {name}=value."
    value: Any = data
    for part in loc:
        value = value_at(value, part)
    value = concealed(loc, value)
    key = find_key(model, data, loc)
    wants = list(dict.fromkeys(_must_be(detail) for detail in details))
    fix = absent(model, value) if any(d["type"] in _CHOICES for d in details) else None
    fix = fix or (key and key.fix) or ("" if value == REDACTED else _fix(details, value, key))
    subject = name or file_name(source)
    return f"{subject} must be {' or '.join(wants)}: {show(value)}. {fix}".rstrip()


def _must_be(detail: ErrorDetails) -> str:
    if detail["type"] in _CHOICES:
        choices = _choices(detail)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    template = _MUST_BE.get(detail["type"])
    if template is not None:
        return template.format(**detail.get("ctx", {}))
    words = one_line(detail["msg"]).removeprefix("Input should be ")
    return words[:1].lower() + words[1:]


def _choices(detail: ErrorDetails) -> list[str]:
    expected = detail["ctx"].get("expected_tags") or detail["ctx"]["expected"]
    return [f"`{choice.strip(chr(39))}`" for choice in re.split(r", | or ", expected)]


def _fix(details: list[ErrorDetails], value: Any, key: Key | None) -> str:
    kinds = {detail["type"] for detail in details}
    if isinstance(value, str):
        choices = [c.strip("`") for d in details if d["type"] in _CHOICES for c in _choices(d)]
        near = difflib.get_close_matches(value, choices, n=1)
        if near:
            return f"Did you mean `{near[0]}`?"
        if kinds & {"int_type", "float_type"} and re.fullmatch(r"[-+]?\d[\d_]*(\.\d+)?", value):
            return "Remove the quotes."
        if "bool_type" in kinds and value.lower() in ("true", "false"):
            return f"Write {value.lower()}, in lower case and without quotes."
    if isinstance(value, float) and value.is_integer() and kinds & {"int_type", "int_from_float"}:
        return f"Write {int(value)}."
    default = key.default if key else ...
    if default is None:
        return "Leave it out for the default."
    if isinstance(default, bool | int | float | str | tuple | list):
        return f"The default is {show(default)}."
    return ""


def _with_section(loc: Loc, message: str, model: Any, data: Any) -> str:
    """Put the section before a message that a model's own check wrote."""
    word = message.split(" ", 1)[0]
    first = re.split(r"[.\[]", word, maxsplit=1)[0].rstrip(":")
    name = dotted(loc)
    if not loc or word.startswith(f"{name}.") or word == name:
        return message
    if find_key(model, data, (*loc, first)) is not None:
        return f"{name}.{message}"
    if first == loc[-1]:
        return dotted(loc[:-1]) + ("." if loc[:-1] else "") + message
    return f"{name} {message}" if first in ("must", "is", "has", "needs") else f"{name}: {message}"
