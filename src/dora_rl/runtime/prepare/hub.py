"""Models by their names on the Hugging Face hub: from the library's cache, else downloaded.

What the cache has whole is taken without asking the network, so that a resumed run has the model
that it was started with. Only safetensors, configuration and tokenizer are downloaded: no pickle,
no code.
"""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dora_rl.core.protocol.errors import UserError
from dora_rl.extras import require
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.huggingface import stored_tensors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_PATIENCE_S = 10.0  # for the first answer; where there is no network, the system may wait longer


def is_name(text: str) -> bool:
    """Whether it has the form `owner/name`, and is no path here."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def find(name: str) -> Path:
    """The directory of the model of this name."""
    require(f"model.path = {name}", "train")
    return _cached(name) or _download(name)


def _cached(name: str) -> Path | None:
    """Where the cache has all of it."""
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError, WeightsError):
        found = snapshot_download(name, allow_patterns=_FILES, local_files_only=True)
        directory = Path(str(found))
        stored_tensors(directory)
        if (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file():
            return directory
    return None


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        _within(_PATIENCE_S, lambda: HfApi().model_info(name, timeout=_PATIENCE_S))
        return Path(str(snapshot_download(name, allow_patterns=_FILES)))
    except OfflineModeIsEnabled:
        raise _unreachable(name, "HF_HUB_OFFLINE is set") from None
    except (GatedRepoError, RepositoryNotFoundError) as error:
        gated = isinstance(error, GatedRepoError)
        what = "asks for its terms to be accepted" if gated else "is not there, or is private"
        raise UserError(
            f"neither a directory nor a model that the hub gives: `{name}` {what}. Check the "
            "name, or log in with: hf auth login"
        ) from None
    except HfHubHTTPError as error:
        raise _unreachable(name, _said(error)) from None
    except Exception as error:  # of whichever HTTP library it uses
        raise _unreachable(name, _said(error)) from error


def _unreachable(name: str, why: str) -> UserError:
    return UserError(
        f"neither a directory nor in the cache, and the hub cannot be reached: `{name}`: {why}. "
        f"Where there is a network, run: hf download {name} --local-dir DIR; then set "
        "model.path=DIR."
    )


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Do it, or give up after so long: the look-up of a host heeds no time limit of ours."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return (text if len(text) <= 200 else f"{text[:199]}…") or type(error).__name__
