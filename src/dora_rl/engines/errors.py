"""What an engine refuses. After each of these the engine is as it was and continues to serve.

Except after an install that failed while it loaded: the evicted version is gone then.
"""

from dora_rl.core.protocol.errors import UserError


class RequestRefused(UserError):
    """A request, or a sampling parameter, that this engine cannot serve, now or later.

    It is not tried again.
    """


class VersionRefused(UserError):
    """A version that cannot be installed, evicted or used here now."""


class ImportRefused(UserError):
    """An exported trajectory that must not continue here: damaged, or of other weights."""


class KvRefused(ImportRefused):
    """KV that this engine cannot read, such as that of other kernels; the tokens are good."""


class Unsupported(UserError):
    """An ability that this engine does not have: see `dora_rl.engines.base.Capabilities`."""


class UnknownTrajectory(UserError):
    """No trajectory of this id is here (it may have finished, or been cancelled)."""
