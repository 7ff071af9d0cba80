"""What a transport refuses."""

from dora_rl.core.protocol.errors import UserError


class RecordLost(UserError):
    """A record is not there, or not as it was written."""
