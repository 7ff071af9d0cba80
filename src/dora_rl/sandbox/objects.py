"""Objects by name: `module:attribute` into the object, and back where that is possible.

Standard library alone: the workers use it too.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from dora_rl.sandbox.errors import LoadError

_LONGEST = 300  # characters of somebody else's message in one of ours


def search_path(more: Sequence[str] = ()) -> list[str]:
    """Where modules are found: `sys.path`, then `more`, then the working directory.

    The last two shadow nothing that is installed. Where the working directory is in `sys.path`
    already, `more` comes right before it.
    """
    return [os.path.abspath(entry) for entry in _extended(more)]


def _extended(more: Sequence[str]) -> list[str]:
    here = os.getcwd()
    known = [os.path.abspath(entry) for entry in sys.path]  # an empty one is the working directory
    at = known.index(here) if here in known else len(known)
    new = [entry for entry in map(os.path.abspath, more) if entry not in known[:at]]
    return [*sys.path[:at], *new, *(sys.path[at:] or [here])]


def find_module(name: str, more: Sequence[str] = ()) -> ModuleSpec | None:
    """The module of this name as a worker finds it. Nothing is imported, no package either."""
    importlib.invalidate_caches()
    found: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        inside = None if found is None else list(found.submodule_search_locations or ())
        found = _find_spec(".".join(parts[:depth]), inside, more)
        if found is None:
            return None
    return found


def _find_spec(name: str, inside: list[str] | None, more: Sequence[str]) -> ModuleSpec | None:
    """`inside` is where the package has its modules; None for what is in no package."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is None:
            continue
        where = search_path(more) if inside is None and finder is PathFinder else inside
        spec: ModuleSpec | None = find(name, where)
        if spec is not None:
            return spec
    return None


def no_module(key: str, name: str) -> LoadError:
    return LoadError(
        f"{key}: no module `{name}`. Install it, put it beside the TOML file, or run from its "
        "directory."
    )


def import_object(name: str, key: str, more: Sequence[str] = ()) -> Any:
    """The object that `module:attribute` names; `key` is the setting that named it.

    `more` are directories to look in besides `sys.path` and the working one.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise LoadError(f"{key} must be an import path: `{name}`. Write module:function.")
    sys.path[:] = _extended(more)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # an import runs code of the user's, which raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise no_module(key, module_name) from None
        raise LoadError(f"{key}: importing `{module_name}` failed: {said(error)}") from error
    _check_origin(found, key, more)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise LoadError(
                f"{key}: `{module_name}` has no `{attribute}`. Check the name."
            ) from None
    return found


def _check_origin(module: Any, key: str, more: Sequence[str]) -> None:
    """Refuse a module that was imported earlier, from elsewhere, under the same name."""
    spec, file = find_module(module.__name__, more), getattr(module, "__file__", None)
    if spec is None or not spec.has_location or spec.origin is None or not isinstance(file, str):
        return
    if os.path.realpath(spec.origin) != os.path.realpath(file):
        raise LoadError(
            f"{key}: a module `{module.__name__}` was imported from `{file}` before, so that "
            f"`{spec.origin}` cannot be. Rename one of them, or use another process."
        )


def name_of(thing: Any) -> str | None:
    """The import path by which another process finds the same object, if there is one."""
    module_name = getattr(thing, "__module__", None)
    attribute = getattr(thing, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(attribute, str):
        return None
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__" or not _can_be_found(module_name):
        return None
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return f"{module_name}:{attribute}" if found is thing else None


def label_of(thing: Any) -> str:
    """A short name to show."""
    if isinstance(thing, str):
        return thing.rpartition(":")[2]
    return str(getattr(thing, "__name__", None) or type(thing).__name__)


def said(error: BaseException) -> str:
    """An exception in one line of bounded length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a __str__ of the user's
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _can_be_found(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):  # a parent that is gone; a module without a spec
        return False
