"""What a transport refuses."""

from dora_rl.core.protocol.errors import UserError


class RecordLost(UserError):
    """A record is not there, or not as it was written."""


class ObjectStoreError(UserError):
    """An object finds no room in the store of the cluster, is gone, or does not come in time."""
