"""The model of the quickstart: a tiny Llama, warm-started on `dora_rl.tasks.chains`.

`scripts/make_quickstart_model.py` makes it and checks it. Only files live here, and the way to
them.
"""

from importlib.resources import files
from pathlib import Path

from dora_rl.core.protocol.errors import UserError


def model_directory() -> Path:
    """The Hugging Face directory of the packaged model."""
    directory = files(__name__) / "model"
    if not isinstance(directory, Path):
        raise UserError(
            f"the quickstart's model must be in a directory: `{directory}`. "
            "Install dora-rl unpacked, as pip does."
        )
    return directory
