"""Objects by name: `module:attribute` into the object, and back where that is possible.

Standard library alone: the workers use it too.
"""

import importlib
import importlib.util
import os
import sys
from typing import Any

from dora_rl.tasks.errors import TaskError

_LONGEST = 300  # characters of somebody else's message in one of ours


def search_path() -> list[str]:
    """Where modules are found, the working directory last, so that it shadows nothing."""
    here = os.getcwd()
    path = [os.path.abspath(entry) if entry else here for entry in sys.path]
    return path if here in path else [*path, here]


def import_object(name: str, key: str) -> Any:
    """The object that `module:attribute` names; `key` is the setting that named it."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise TaskError(f"{key} must be an import path: `{name}`. Write module:function.")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # an import runs code of the user's, which raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise TaskError(
                f"{key}: no module `{module_name}`. Install it, or run from its directory."
            ) from None
        raise TaskError(f"{key}: importing `{module_name}` failed: {said(error)}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TaskError(
                f"{key}: `{module_name}` has no `{attribute}`. Check the name."
            ) from None
    return found


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
