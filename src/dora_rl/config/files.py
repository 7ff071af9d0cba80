"""Configuration as text: TOML files, `--set` overrides, and the saved result."""

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dora_rl.config.redaction import REDACTED, looks_secret, names_secret, names_token, redacted
from dora_rl.config.text import file_name, one_line, show
from dora_rl.core.protocol.errors import UserError

_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LARGEST = 16 * 2**20  # bytes: far above any configuration
_SET_FORM = "Write --set section.key=value, such as --set orchestration.max_staleness=2."


def load_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file."""
    name = file_name(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise UserError(f"no such file: {name}. Check the path.") from None
    except IsADirectoryError:
        raise UserError(f"not a file but a directory: {name}. Name a TOML file.") from None
    except PermissionError:
        raise UserError(f"no permission to read: {name}. Change its mode or owner.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = one_line(getattr(error, "strerror", None) or error)
        raise UserError(f"cannot read {name}: {reason}. Check the path.") from None
    if len(raw) > _LARGEST:
        raise UserError(f"larger than {_LARGEST // 2**20} MiB: {name}. Name a TOML file.")
    try:
        data = tomllib.loads(raw.decode("utf-8-sig"))
        copy.deepcopy(data)  # keys like a.a.a nest without recursion; nobody else could walk them
        return data
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text: {name} (byte {error.start}). Save it as UTF-8 TOML."
        ) from None
    except RecursionError:
        raise UserError(f"nested too deeply: {name}. Flatten its tables and arrays.") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        reason = one_line(error).rstrip(".")
        raise UserError(
            f"not valid TOML: {name}: {reason}. Fix that line, or name a TOML file."
        ) from None


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `a.b=value` applied in order.

    A value is read as a TOML literal, or as a plain string where it is none.
    """
    result = copy.deepcopy(dict(data))
    for override in overrides:
        path, value = _parse_override(override)
        _set(result, path, value, override)
    return result


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections laid over each other, key by key; later ones win."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            result[section] = {**result.get(section, {}), **values}
    return result


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    text = text.strip()
    if not equals:
        raise UserError(f"--set needs a key and a value: {_shown(override)}. {_SET_FORM}")
    if not all(_KEY.fullmatch(part) for part in path):
        raise UserError(f"--set has a malformed key: {_shown(override)}. {_SET_FORM}")
    if not text:
        raise UserError(
            f"--set has no value: {_shown(override)}. "
            f"Write --set {key.strip()}='\"\"' for an empty string."
        )
    if not text.isprintable():
        raise UserError(f"--set has an unprintable value: {_shown(override)}. {_SET_FORM}")
    try:
        # Only one line gets here, so the literal cannot smuggle in a second key.
        return path, tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return path, text


def _shown(override: str) -> str:
    """An override for a message: without its value, where that is a secret."""
    key, equals, text = override.partition("=")
    words = _KEY.findall(override)  # also of the value, which may be a table with keys of its own
    if looks_secret(text) or any(names_secret(word) or names_token(word) for word in words):
        return show(f"{key}={REDACTED}" if equals else REDACTED)
    return show(override)


def _set(data: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    node: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, dict):
            key: str | int = part
            if not last:
                node.setdefault(part, {})
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            key = int(part)
        elif isinstance(node, list):
            raise UserError(
                f"--set {'.'.join(path[:depth])} has {len(node)} entries, counted from 0: "
                f"{_shown(override)}. Use an index below {len(node)}, or set the whole list."
            )
        else:
            raise UserError(
                f"--set {'.'.join(path[:depth])} is a value, not a section: {_shown(override)}. "
                f"Use --set {'.'.join(path[:depth])}=value."
            )
        if last:
            node[key] = value
        else:
            node = node[key]


def dump_toml(model: Any, *, hide_secrets: bool = False) -> str:
    """Write a model as TOML that `validate` reads back.

    TOML has no null: a key that is None is left out, so None must be its default.
    With `hide_secrets` it is for reading: `[redacted]` stands where a secret was.
    """
    plain = TypeAdapter(type(model)).dump_python(model, mode="json", exclude_none=True)
    import tomli_w  # here: workers read settings, and their Python may not have it

    return tomli_w.dumps(redacted(plain) if hide_secrets else plain)
