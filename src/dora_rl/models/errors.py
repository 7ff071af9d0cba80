"""What the models refuse."""

from dora_rl.core.protocol.errors import UserError


class ModelError(UserError):
    """A model directory that is incomplete, damaged, or of a kind that is not supported."""
