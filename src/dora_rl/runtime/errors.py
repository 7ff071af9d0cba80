"""How a run fails, apart from bad input."""

from dora_rl.core.protocol.errors import DoraError


class RunFailed(DoraError):
    """The run cannot continue; the message names the worker at fault."""
