"""Keys that no model declares are refused, with the one that was probably meant."""

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dora_rl.config.redaction import Loc
from dora_rl.config.shape import Key, child, keys_of, tables
from dora_rl.config.text import dotted, show
from dora_rl.core.protocol.errors import UserError

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
                raise UserError(_unknown_key(root, known, (*loc, key), value))
            refuse_unknown_keys(root, child(annotation, data, key), value, (*loc, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            refuse_unknown_keys(root, child(annotation, data, index), value, (*loc, index))


def _takes_extra(section: Any) -> bool:
    return issubclass(section, BaseModel) and section.model_config.get("extra") == "allow"


def absent(root: Any, *words: Any) -> str | None:
    """What a model says of words that name something which it does not have yet, if it does."""
    says = getattr(root, "not_yet", None)
    return says(*(word for word in words if isinstance(word, str))) if says else None


def _unknown_key(root: Any, known: set[str], loc: Loc, value: Any) -> str:
    key, section = str(loc[-1]), dotted(loc[:-1])
    declared = dict(_all_keys(root))
    everywhere = set(declared)
    place = f"section `{section}`" if section else "the top level"
    known_keys = f"Known keys of {place}: {', '.join(f'`{name}`' for name in sorted(known))}."
    if dotted(loc) in everywhere:
        return f"key of another kind of {place}: {show(dotted(loc))}. {known_keys}"
    text = f"unknown key: {show(dotted(loc))}."
    word = value if isinstance(value, str) and value.isalpha() else None  # not a path that has one
    missing = absent(root, word, key)
    if missing is not None:
        return f"{text} {missing}"
    here, score_here = _nearest(key, {dotted((*loc[:-1], name)) for name in known})
    same = _same_thing(declared, loc, value, misspelt=here is not None)
    if same is not None:
        return same
    elsewhere, score_elsewhere = _nearest(
        key, {other for other in everywhere if other.rpartition(".")[0] != section}
    )
    if elsewhere and score_elsewhere > score_here + _HOME_BONUS:
        return f"{text} Did you mean `{elsewhere}`, which is in another section?"
    if here:
        return f"{text} Did you mean `{here}`?"
    return f"{text} {known_keys}"


def _same_thing(declared: Mapping[str, Key], loc: Loc, value: Any, *, misspelt: bool) -> str | None:
    """Where a key of another configuration has its place in this one, if it has one.

    A section that is only misspelt is none of another configuration.
    """
    theirs = {key.elsewhere: name for name, key in declared.items() if key.elsewhere is not None}
    if dotted(loc) in theirs:
        return f"unknown key: {show(dotted(loc))}. Here it is `{theirs[dotted(loc)]}`."
    for inner in value if isinstance(value, Mapping) else ():
        asked = dotted((*loc, inner))
        homes = [name for name in declared if name.rpartition(".")[2] == inner]
        if asked in theirs or (len(homes) == 1 and not misspelt):
            return f"unknown key: {show(asked)}. Here it is `{theirs.get(asked) or homes[0]}`."
    return None


def nearest_keys(root: Any, key: str, others: Collection[str] = ()) -> list[str]:
    """The dotted names of a model, or the `others`, that end most like `key`; none if none does."""
    names = {*dict(_all_keys(root)), *others}
    best, _ = _nearest(key, names)
    if best is None:
        return []
    last = best.rpartition(".")[2]
    return sorted(name for name in names if name.rpartition(".")[2] == last)


def _nearest(key: str, names: set[str]) -> tuple[str | None, float]:
    """The dotted name whose last part is most like `key`, and how alike they are."""
    best, best_score = None, 0.0
    for name in sorted(names):
        last = name.rpartition(".")[2]
        score = difflib.SequenceMatcher(None, key.lower(), last.lower()).ratio()
        if score >= _NEAR and score > best_score:
            best, best_score = name, score
    return best, best_score


def _all_keys(annotation: Any, prefix: Loc = ()) -> Iterator[tuple[str, Key]]:
    for section in tables(annotation, None):
        for name, key in keys_of(section).items():
            yield dotted((*prefix, name)), key
            if len(prefix) < _MAX_DEPTH:
                yield from _all_keys(key.type, (*prefix, name))
