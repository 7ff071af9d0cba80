"""When devices change roles: the rule of costs and benefits, as pure functions (docs/elastic.md).

Two loans are known. Training lends to rollout while it waits for a batch; rollout, once the next
batch waits for the trainer, lends what it can spare until then. A loan ends by itself: the one to
rollout before the next train step begins, the one to training when that step is taken.

**No thrash.** In each direction there is one loan a train step (`Lending.step`, `helped_step`),
and a loan is two switches. So s steps see at most 2 · (s + 1) switches of an instance, however
wrong the estimates are. Below that bound it is about gains: nothing is lent unless the seconds
saved are `gain` times the seconds at stake; where a wait is shorter than its switches, nobody does.
"""

from math import inf
from typing import NamedTuple


class Wait(NamedTuple):
    """A trainer that waits for its next batch, and what its devices could do meanwhile."""

    missing: int  # complete groups that the batch still lacks
    groups_per_s: float  # completed by rollout on its own devices
    own_slots: int  # of rollout on its own devices
    more_slots: int  # that the loan would add, as far as there is work for them
    wake_s: float  # until a lent instance generates: the switch, and an install
    sleep_s: float  # until its devices are back: moves, parking, the switch

    @property
    def alone_s(self) -> float:
        """How long the wait will be without a loan."""
        return _seconds(self.missing, self.groups_per_s)

    @property
    def saved_s(self) -> float:
        """How much sooner the batch is there with a loan.

        With e = more / own slots, rollout is (1 + e) times as fast once the instances are awake,
        which they are but for c = wake_s + sleep_s of the wait. With w the wait alone, the wait t
        with a loan has t + e (t - c) = w, so w - t = e (w - c) / (1 + e).
        """
        if self.own_slots <= 0 or self.more_slots <= 0:
            return 0.0
        more = self.more_slots / self.own_slots
        if self.alone_s == inf:
            return 0.0  # nothing was ever completed: there is no telling
        return max(0.0, more * (self.alone_s - self.wake_s - self.sleep_s) / (1 + more))

    def pays(self, gain: float) -> bool:
        """At stake is `sleep_s`: so long the trainer waits if the batch is there unexpectedly."""
        return self.saved_s > 0 and self.saved_s >= gain * self.sleep_s


class IdleInstances(NamedTuple):
    """Instances that rollout can spare during a train step that has some time to go."""

    instances: int
    trainer_instances: int  # the trainer's own devices, counted in instances
    left_s: float  # of the step, on the trainer's own devices
    wake_s: float
    sleep_s: float

    @property
    def saved_s(self) -> float:
        """How much sooner the step is taken: n more beside m save n / (m + n) of what is left."""
        share = self.instances / (self.trainer_instances + self.instances)
        return max(0.0, share * (self.left_s - self.sleep_s))

    def pays(self, gain: float) -> bool:
        """At stake is `wake_s`, in which the instances are missed when the step is over."""
        return self.saved_s > 0 and self.saved_s >= gain * self.wake_s


def due_back(missing: int, groups_per_s: float, sleep_s: float) -> bool:
    """Whether the trainer should ask for its devices now, to have them when its batch is there."""
    return _seconds(missing, groups_per_s) <= sleep_s


def _seconds(groups: int, groups_per_s: float) -> float:
    if groups <= 0:
        return 0.0
    return groups / groups_per_s if groups_per_s > 0 else inf
