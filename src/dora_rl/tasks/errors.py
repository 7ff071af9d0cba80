"""What a task refuses."""

from dora_rl.core.protocol.errors import UserError


class TaskError(UserError):
    """Prompts, a reward, an environment or a template that cannot be used as they are."""
