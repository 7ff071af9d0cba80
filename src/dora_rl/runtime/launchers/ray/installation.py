"""Whether Ray is there in a version that we know, and what it reads when it is imported.

Free of Ray: what is wrong is told before it is imported, which takes seconds.
"""

import os
import secrets
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from dora_rl.core.protocol.errors import UserError
from dora_rl.extras import install, require

if TYPE_CHECKING:
    from dora_rl.runtime.config import RuntimeSettings

USER = "runtime.kind=ray"
_LEAST, _BELOW = (2, 60), (3, 0)  # as pyproject.toml has it
ADDRESS = "RAY_ADDRESS"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: one node, which listens at loopback alone
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A worker that asks for no GPU sees those of its node, as in `local`.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def check_installed() -> None:
    """Refuse a run where Ray is missing, or is of another version than those that we know."""
    require(USER, "ray")
    found = version("ray")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not _LEAST <= numbers < _BELOW:
        known = f">={_dotted(_LEAST)},<{_dotted(_BELOW)}"
        raise UserError(f"Ray must be {known} for {USER}: `{found}`. Run: {install('ray')}")


def address_of(setting: str | None) -> str | None:
    """Of the cluster to connect to; None if the run starts its own."""
    return setting or os.environ.get(ADDRESS) or None


def on_cluster(runtime: "RuntimeSettings") -> bool:
    """Whether workers are on a cluster that runs, and so on other machines than this one."""
    return runtime.kind == "ray" and address_of(runtime.ray.address) is not None


def prepare_import(address: str | None) -> None:
    """Set what Ray reads from the environment, unless the user has.

    A cluster of our own listens at loopback alone, and takes no call without its token.
    """
    for name, value in _ALWAYS.items():
        os.environ.setdefault(name, value)
    if address is not None or "ray" in sys.modules:
        return
    os.environ.setdefault(_LOOPBACK, "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def listens_beyond(node: str) -> UserError:
    """What to say of a cluster of our own that has another address than loopback."""
    return UserError(
        f"the cluster of this run would listen at `{node}`, since Ray was imported before. Set "
        f"{_LOOPBACK}=0 before that, or call ray.init() yourself."
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
