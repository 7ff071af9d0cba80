"""What an engine refuses. After each of these the engine is as it was and goes on serving."""

from dora_rl.core.errors import UserError


class RequestRefused(UserError):
    """A request, or a sampling parameter, that this engine cannot serve."""


class VersionRefused(UserError):
    """A version that cannot be installed, retired or used here now."""


class ImportRefused(UserError):
    """An exported trajectory that must not go on here: damaged, or of other weights."""


class UnknownTrajectory(UserError):
    """No trajectory of this id is here (it may have finished, or been cancelled)."""
