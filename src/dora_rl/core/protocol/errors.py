"""The exception tree of the project. A message names the value and the fix."""


class DoraError(Exception):
    """Base of every error that this project raises on purpose."""


class UserError(DoraError, ValueError):
    """Bad input: the command line shows the message and exits with code 2."""


class SettingsError(UserError):
    """A setting is out of its range, or contradicts another."""


class JournalError(UserError):
    """A journal cannot be read: truncated, altered, or of another format."""


class RefusedEvent(DoraError):
    """An event that makes no sense; the state is as it was before."""


class IllegalTransition(DoraError):
    """A state was asked to move where its table does not lead: a bug in the core."""


class InvariantViolation(DoraError):
    """A promise of the core does not hold; the message lists each breach."""
