"""Digests by which a resume tells whether the code of rewards, environment and prompts changed.

Code is looked up as the workers look it up, and read, never imported. What cannot be read is
`UNREADABLE`, which equals nothing: a resume refuses it unless it is accepted by name.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Final

from dora_rl.sandbox.objects import find_module, name_of, no_module
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.rewards import BUILT_IN

UNREADABLE: Final = "unreadable"


def digest(content: Any) -> str:
    """Of anything that JSON can hold."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def of_functions(functions: Sequence[UserFunction], key: str, more: Sequence[str]) -> str:
    """Of rewards or environments: their names, weights, options and code."""
    found = []
    for given in functions:
        function = given.function
        code = code_of(function, key, more)
        if code == UNREADABLE:
            return UNREADABLE
        shown = function if isinstance(function, str) else name_of(function) or given.name
        found.append([given.name, shown, given.weight, given.options, code])
    return digest(found)


def code_of(thing: Any, key: str, more: Sequence[str] = ()) -> Any:
    """The text of the module of what is named, or of an object's code; None for a built-in.

    `key` is the setting that has it, `more` are directories with modules.
    """
    if isinstance(thing, str):
        return None if thing in BUILT_IN else _module_code(thing.partition(":")[0], key, more)
    if isinstance(thing, functools.partial):
        return _with_state(thing.func, [thing.args, thing.keywords])
    try:
        return inspect.getsource(thing)
    except OSError:  # typed in, or its file is gone
        return UNREADABLE
    except TypeError:  # an object, or not in Python
        state = getattr(thing, "__dict__", None)
        return UNREADABLE if state is None else _with_state(type(thing), state)


def _with_state(code: Any, state: Any) -> Any:
    """Code that behaves according to what it holds."""
    try:
        return [inspect.getsource(code), json.dumps(state, sort_keys=True)]
    except (OSError, TypeError, ValueError, RecursionError):
        return UNREADABLE


def _module_code(name: str, key: str, more: Sequence[str]) -> Any:
    """The text of a module; with those of the user's own that it imports, by name, if it does."""
    found: dict[str, str] = {}
    wanted = [name]
    while wanted:
        module = wanted.pop()
        spec = find_module(module, more)
        if spec is None or spec.origin is None:
            if module != name:  # imported where it may be missing, or no module but an attribute
                continue
            raise no_module(key, name)
        if module not in found and (module == name or _is_own(module, more)):
            found[module] = _text(spec, key)
            if _is_own(module, more):
                package = module if spec.submodule_search_locations else module.rpartition(".")[0]
                wanted += sorted(_imported(found[module], package) | ({package} - {""}))
    return found[name] if len(found) == 1 else found


def _is_own(module: str, more: Sequence[str]) -> bool:
    """Whether it lies in a directory of the user's, and is not installed."""
    spec = find_module(module.partition(".")[0], more)
    if spec is None or spec.origin is None or not spec.has_location:
        return False
    folder = os.path.dirname(spec.origin)
    if spec.submodule_search_locations:
        folder = os.path.dirname(folder)
    return folder in (os.getcwd(), *map(os.path.abspath, more))


def _imported(text: str, package: str) -> set[str]:
    """Modules that a module's text imports, anywhere in it; attributes may be among them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()  # whoever imports it will say so
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, node.module or ""] if node.level else [node.module or ""])
            base = base.strip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)} - {""}
    return names


def _text(spec: ModuleSpec, key: str) -> str:
    if not spec.has_location or spec.origin is None:  # a part of the interpreter
        return sys.version
    try:
        content: bytes = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
    except (AttributeError, OSError) as error:
        raise TaskError(f"{key}: cannot read `{spec.origin}`: {error}. Check its mode.") from None
    if not spec.origin.endswith(".py"):
        return hashlib.sha256(content).hexdigest()
    return content.decode("utf-8", "replace").replace("\r\n", "\n")
