"""The KV memory of one device group, in tokens.

Invariant: `used` is the sum over runs that are held of their tokens, with the prompt that
siblings share counted once; reservations come on top. Knows nothing of time or of batches.
"""

from dora_rl.simulator.runs import Run


class KvMemory:
    """Who holds how much. A run's `debt` is the part of its context not computed yet."""

    __slots__ = ("capacity", "prompts", "reserved_kv", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """As in a new process."""
        self.used = 0
        self.reserved_kv = 0
        self.prompts: dict[int, int] = {}  # group -> held runs that share its prompt

    def missing(self, run: Run) -> int:
        """Tokens that the device does not hold yet for a run."""
        if run.held:
            return run.debt
        return run.context - run.prompt if run.group in self.prompts else run.context

    def hold(self, run: Run) -> None:
        """A run's KV has arrived on the device from elsewhere."""
        sharers = self.prompts.get(run.group, 0)
        self.prompts[run.group] = sharers + 1
        self.used += run.context - run.debt - (run.prompt if sharers else 0)
        run.held = True

    def drop(self, run: Run) -> int:
        """Free a run's KV on the device; returns how many tokens that were."""
        if not run.held:
            return 0
        run.held = False
        freed = run.context - run.debt - run.prompt
        sharers = self.prompts[run.group] - 1
        if sharers:
            self.prompts[run.group] = sharers
        else:
            del self.prompts[run.group]
            freed += run.prompt
        self.used -= freed
        return freed
