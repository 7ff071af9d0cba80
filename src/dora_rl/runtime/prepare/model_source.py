"""Where the initial policy comes from: a packaged model, a directory, or a name on the hub."""

from pathlib import Path

from dora_rl.core.protocol.errors import UserError
from dora_rl.models import packaged
from dora_rl.runtime.prepare import hub

QUICKSTART = "quickstart"
PACKAGED = (QUICKSTART, *packaged.MODELS)


def is_packaged(path: str) -> bool:
    """Whether it is the name of a packaged model, which comes before a directory of that name."""
    return path in PACKAGED


def find_model(path: str) -> Path:
    """The directory of a model by its path or name."""
    if path == QUICKSTART:
        from dora_rl.quickstart import model_directory

        return model_directory()
    if is_packaged(path):
        return packaged.find(path)
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if hub.is_name(path):
        return hub.find(path)
    raise UserError(
        f"not a model directory: `{path}` has no config.json. Give a Hugging Face directory, a "
        f"name on the hub such as Qwen/Qwen3-0.6B, or a packaged model: {', '.join(PACKAGED)}."
    )
