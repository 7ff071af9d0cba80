"""What the virtual world refuses."""

from dora_rl.core.protocol.errors import DoraError


class WorldError(DoraError):
    """A command that no real engine could perform, or that would be unsafe: a bug in the core."""
