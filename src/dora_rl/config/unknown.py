"""Keys that no model declares are refused, with the one that was probably meant."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dora_rl.config.redaction import Loc
from dora_rl.config.shape import child, keys_of, tables
from dora_rl.config.text import dotted, show
from dora_rl.core.errors import UserError

_NEAR = 0.6  # difflib's own cutoff for "a close match"
_HOME_BONUS = 0.1  # a key of the same section wins over one elsewhere that is barely nearer
_MAX_DEPTH = 8  # levels below which no key is suggested; ends the walk of recursive models


def refuse_unknown_keys(root: Any, annotation: Any, data: Any, loc: Loc) -> None:
    """Walk `data` along the types of `annotation`, and raise at the first unknown key or NaN.

    Done before validation: pydantic ignores unknown keys in a stdlib dataclass unless its
    parent forbids them, and only from `root` the nearest key of another section is seen.
    """
    if isinstance(data, float) and math.isnan(data):
        raise UserError(f"{dotted(loc)} must be a number: `nan`. Give its value.")
    if isinstance(data, Mapping):
        sections = tables(annotation, data)
        known = {name for section in sections for name in keys_of(section)}
        closed = bool(sections) and not any(_takes_extra(section) for section in sections)
        for key, value in data.items():
            if closed and key not in known:
                raise UserError(_unknown_key(root, known, (*loc, key)))
            refuse_unknown_keys(root, child(annotation, data, key), value, (*loc, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            refuse_unknown_keys(root, child(annotation, data, index), value, (*loc, index))


def _takes_extra(section: Any) -> bool:
    return issubclass(section, BaseModel) and section.model_config.get("extra") == "allow"


def _unknown_key(root: Any, known: set[str], loc: Loc) -> str:
    key, section = str(loc[-1]), dotted(loc[:-1])
    everywhere = set(_all_keys(root))
    place = f"section `{section}`" if section else "the top level"
    known_keys = f"Known keys of {place}: {', '.join(f'`{name}`' for name in sorted(known))}."
    if dotted(loc) in everywhere:
        return f"key of another kind of {place}: {show(dotted(loc))}. {known_keys}"
    text = f"unknown key: {show(dotted(loc))}."
    here, score_here = _nearest(key, {dotted((*loc[:-1], name)) for name in known})
    elsewhere, score_elsewhere = _nearest(
        key, {other for other in everywhere if other.rpartition(".")[0] != section}
    )
    if elsewhere and score_elsewhere > score_here + _HOME_BONUS:
        return f"{text} Did you mean `{elsewhere}`, which is in another section?"
    if here:
        return f"{text} Did you mean `{here}`?"
    return f"{text} {known_keys}"


def _nearest(key: str, names: set[str]) -> tuple[str | None, float]:
    """The dotted name whose last part is most like `key`, and how alike they are."""
    best, best_score = None, 0.0
    for name in sorted(names):
        last = name.rpartition(".")[2]
        score = difflib.SequenceMatcher(None, key.lower(), last.lower()).ratio()
        if score >= _NEAR and score > best_score:
            best, best_score = name, score
    return best, best_score


def _all_keys(annotation: Any, prefix: Loc = ()) -> Iterator[str]:
    for section in tables(annotation, None):
        for name, key in keys_of(section).items():
            yield dotted((*prefix, name))
            if len(prefix) < _MAX_DEPTH:
                yield from _all_keys(key.type, (*prefix, name))
