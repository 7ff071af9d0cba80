"""What the sandbox refuses."""

from dora_rl.core.protocol.errors import UserError


class LoadError(UserError):
    """The user's code cannot be imported, or no worker gets to load it."""


class SandboxError(UserError):
    """A program could not be run, or nothing is known of how it ended; never its own failure."""
