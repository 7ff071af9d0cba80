"""The least time that a train step can take on this machine, from parts measured one by one.

A part is what a step cannot do without: the core-seconds of training its batch, at the number of
threads that needs the fewest; the core-seconds of decoding its tokens, at the batch that needs
the fewest; and the chain of its slowest trajectory, whose tokens come one after the other, with
the waits for its tools in between. With

    work = (training + decoding, in core-seconds) / cores
    tail = the slowest trajectory of a step, alone on a core, waits included
    train = seconds of training at the best number of threads

a step takes at least

    the machine            work                               every core is busy, always
    in turns, bounded      train + max(decoding / cores, tail)    sync
    in turns               train + decoding / cores               partial: the tail is cut off
    with its barrier       max(work, train, tail)                 one_step
    overlapping            max(work, train)                       in_flight
    overlapping, bounded   max(work, train, (tail + train) / (K + 1))   multi_version

The last one: what starts on version v is trained by step v + K, which ends K + 1 steps after v was
published, and the tail and that training lie within them. `work` is the limit for everyone; a
floor above it is what a paradigm adds. What a run does besides (the driver, rewards, publishing)
is in no floor. Pure: no torch, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import ParadigmName


class Size(NamedTuple):
    """Of a trajectory: tokens of its response, those that the policy writes, waits for tools."""

    tokens: float
    sampled: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Rates of this machine for one workload, each measured alone."""

    train_token_s: Mapping[int, float]  # seconds of training for a token, by number of threads
    train_token_core_s: Mapping[int, float]  # core-seconds of the same
    decode_token_core_s: Mapping[int, float]  # core-seconds for a token, by rows of the batch

    @property
    def contention(self) -> float:
        """How much longer one thread took than it computed; 1 on a machine without other work."""
        ratios = [
            self.train_token_s[n] / core_s
            for n, core_s in self.train_token_core_s.items()
            if n == 1
        ]
        return max([1.0, *ratios])

    @property
    def quiet_train_token_s(self) -> float:
        """Seconds of training for a token at the best number of threads, without other work.

        Threads that are busy all the time take no less than their share of the core-seconds.
        """
        return min(
            max(self.train_token_s[n] / self.contention, core_s / n)
            for n, core_s in self.train_token_core_s.items()
        )

    @property
    def best_train_threads(self) -> int:
        return min(self.train_token_core_s, key=lambda n: self.train_token_core_s[n])

    @property
    def best_batch(self) -> int:
        return min(self.decode_token_core_s, key=lambda rows: self.decode_token_core_s[rows])

    def to_json(self) -> dict[str, Any]:
        return {
            **{
                name: {str(n): value for n, value in rates.items()}
                for name, rates in asdict(self).items()
            },
            "best_train_threads": self.best_train_threads,
            "best_batch": self.best_batch,
            "contention": self.contention,
        }

    @property
    def alone_token_s(self) -> float:
        """Seconds between two tokens of a trajectory in the smallest batch."""
        fewest = min(self.decode_token_core_s)
        return self.decode_token_core_s[fewest] * fewest


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step of a workload asks for, on the mean over batches."""

    tokens: float  # that are trained on, or read for it
    sampled: float  # of them, what the policy writes
    longest_tokens: float  # that the slowest trajectory samples
    longest_wait_s: float  # that trajectory's waits for its tools

    def with_sampled(self, sampled: float) -> "Demand":
        """The same shape, for a step in which the policy wrote so many tokens."""
        share = sampled / self.sampled if self.sampled else 1.0
        return replace(self, tokens=self.tokens * share, sampled=sampled)


@dataclass(frozen=True, slots=True)
class Floor:
    """The parts of a step in seconds, and what they allow."""

    cores: int
    train_core_s: float
    train_s: float
    decode_core_s: float
    tail_s: float
    """Of the slowest trajectory, waits included."""
    wait_s: float
    """The waits among it."""

    @classmethod
    def of(cls, parts: Parts, demand: Demand, cores: int) -> "Floor":
        decoding_s = demand.longest_tokens * parts.alone_token_s
        return cls(
            cores,
            demand.tokens * min(parts.train_token_core_s.values()),
            demand.tokens * parts.quiet_train_token_s,
            demand.sampled * min(parts.decode_token_core_s.values()),
            decoding_s + demand.longest_wait_s,
            demand.longest_wait_s,
        )

    @property
    def limit_s(self) -> float:
        """With every core busy all the time."""
        return (self.train_core_s + self.decode_core_s) / self.cores

    def of_paradigm(self, name: ParadigmName, max_staleness: int) -> float:
        """The least seconds of a step that works in this way."""
        paradigm = PARADIGMS[name]
        decode_s = self.decode_core_s / self.cores
        if paradigm.colocated:
            return self.train_s + (max(decode_s, self.tail_s) if paradigm.bounded else decode_s)
        least_s = max(self.limit_s, self.train_s)
        if not paradigm.bounded:
            return least_s
        if name is ParadigmName.ONE_STEP:
            return max(least_s, self.tail_s)
        steps = 1 + (max_staleness if paradigm.staleness is None else paradigm.staleness)
        return max(least_s, (self.tail_s + self.train_s) / steps)

    @property
    def sync_rollout_share(self) -> float:
        """Of a synchronous step at its floor, the part in which nothing is trained."""
        whole_s = self.of_paradigm(ParadigmName.SYNC, 0)
        return 1.0 - self.train_s / whole_s if whole_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "limit_s": self.limit_s}


def demand_of(batches: Sequence[Sequence[Size]], alone_token_s: float) -> Demand:
    """The mean step of these batches of trajectories."""
    slowest = [
        max(batch, key=lambda one: one.sampled * alone_token_s + one.wait_s) for batch in batches
    ]
    everyone = [size for batch in batches for size in batch]
    count = len(batches)
    return Demand(
        sum(size.tokens for size in everyone) / count,
        sum(size.sampled for size in everyone) / count,
        sum(size.sampled for size in slowest) / count,
        sum(size.wait_s for size in slowest) / count,
    )
