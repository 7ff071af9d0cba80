"""Libraries that only a part of the project needs: what is absent, and how to get it.

The base installation stays small; `pyproject.toml` lists these libraries as extras. Nothing
here imports them.
"""

import importlib.util

from dora_rl.core.protocol.errors import UserError

# The modules that each extra brings, as `pyproject.toml` has them.
EXTRAS = {
    "engine": ("torch", "safetensors", "tokenizers", "numpy"),
    "train": ("transformers", "jinja2"),
    "lora": ("peft",),
    "tasks": ("reasoning_gym", "math_verify"),
    "datasets": ("datasets",),
    "ray": ("ray",),
    "plot": ("matplotlib",),
    "smollm2": ("transformers", "gguf", "accelerate"),
}


class MissingExtra(UserError):
    """A library that this part needs is not installed."""


def require(user: str, *extras: str) -> None:
    """Raise `MissingExtra` unless every library of the extras is there; `user` needs them.

    Call it before the first import of one of them, with `user` as it would be typed.
    """
    if absent := missing(*extras):
        names = [name for libraries in absent.values() for name in libraries]
        listed, are, them = ", ".join(names), "is", "it"
        if len(names) > 1:
            listed, are, them = f"{', '.join(names[:-1])} and {names[-1]}", "are", "them"
        raise MissingExtra(
            f"{listed} {are} not installed: `{user}` needs {them}. Run: {install(*absent)}"
        )


def missing(*extras: str) -> dict[str, list[str]]:
    """The libraries of each extra that are not there; an extra that is whole is left out."""
    return {
        extra: names
        for extra in extras
        if (names := [name for name in EXTRAS[extra] if not _present(name)])
    }


def install(*extras: str) -> str:
    """The command that brings them."""
    return f"pip install 'dora-rl[{','.join(extras)}]'"


def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
