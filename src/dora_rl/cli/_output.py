"""Files that a command is asked to write: checked before anything is run."""

import os
from collections.abc import Iterable
from pathlib import Path

from dora_rl.core.protocol.errors import UserError


def check_output(path: Path, *, not_these: Iterable[str | Path | None] = ()) -> None:
    """Refuse a path that cannot be written, or that would destroy what it must not.

    `not_these` are the command's inputs and other outputs.
    """
    if path.is_dir():
        raise UserError(f"not a file but a directory: `{path}`. Name a file.")
    if path.exists() and not path.is_file():
        raise UserError(f"not a regular file: `{path}`. Name a file that may be replaced.")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UserError(f"no such directory: `{path.parent}`. Make it, or name another file.")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"no permission to write: `{path}`. Name another file.")
    for other in not_these:
        if other is not None and Path(other).resolve() == path.resolve():
            raise UserError(f"used twice: `{path}`. It would be overwritten; name another file.")
