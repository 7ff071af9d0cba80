"""How a run fails, apart from bad input."""

from dora_rl.core.errors import DoraError


class RunFailed(DoraError):
    """The run cannot go on; the message names the part at fault."""
