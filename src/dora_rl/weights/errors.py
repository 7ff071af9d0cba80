"""What the weight store refuses. After each of these the store is as it was."""

from dora_rl.core.protocol.errors import UserError


class WeightsError(UserError):
    """Weights that cannot be published or read: the message names the tensor or the file."""
