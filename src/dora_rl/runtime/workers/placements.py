"""The placements of one rollout instance, and the engine that they are on.

A placement is one trajectory under one fence. It is on the engine (`HERE`), or apart from it with
what it has written. Whoever changes a stage has told the engine so; slot time is accounted for at
every change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from dora_rl.config.text import one_line
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Fence, TrajectoryId, Version
from dora_rl.engines.base import Engine, Request, Sampling
from dora_rl.engines.errors import ImportRefused, KvRefused, RequestRefused
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.workers.partial_trajectory import PartialTrajectory


class Stage(Enum):
    HERE = auto()  # the engine has it: it generates, or waits for a slot or its environment
    PARKED = auto()  # the engine does not know it; its KV, if it could be exported, is in `stash`
    KEPT = auto()  # handed over; here until the migration is released or undone
    DISPLACED = auto()  # its version gave way to the next, which is not here yet


@dataclass(slots=True)
class PlacedTrajectory:
    """One placement."""

    fence: Fence
    partial: PartialTrajectory
    stage: Stage = Stage.HERE
    paused: bool = False  # a turn has ended: it waits for its environment
    stash: bytes | None = None  # while parked, if the engine can export KV
    kept_from: Stage = Stage.HERE  # what it was before it was handed over
    reported: int = 0  # tokens, in the last report
    saved: int = 0  # tokens that the driver has
    deferred: ms.Continue | ms.Conclude | None = None  # came while it was displaced

    @property
    def id(self) -> TrajectoryId:
        return self.partial.trajectory

    @property
    def wants_slot(self) -> bool:
        return self.stage is Stage.HERE and not self.paused


@dataclass(slots=True)
class Usage:
    """How the slots were used, since the instance started."""

    slots_s: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    reread_tokens: int = 0
    at: float | None = None  # when time was last accounted for


@dataclass(slots=True)
class Placements:
    """All placements of one instance. `report` takes what the core is to hear."""

    engine: Engine
    sampling: Sampling
    seed: int
    clock: Callable[[], float]
    report: Callable[[ev.Event], None]
    suspended: bool = False
    trajectories: dict[TrajectoryId, PlacedTrajectory] = field(default_factory=dict)
    digests: dict[Version, str] = field(default_factory=dict)  # of the versions on the engine
    usage: Usage = field(default_factory=Usage)
    num_running: int = 0
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.slots = self.engine.load().slots

    def get(self, trajectory: TrajectoryId, fence: Fence) -> PlacedTrajectory | None:
        """The placement of this trajectory, unless it has another fence."""
        placed = self.trajectories.get(trajectory)
        return placed if placed is not None and placed.fence == fence else None

    def add(self, placed: PlacedTrajectory) -> None:
        self.account()
        self.trajectories[placed.id] = placed
        self.num_running += placed.wants_slot

    def change(
        self, placed: PlacedTrajectory, *, stage: Stage | None = None, paused: bool | None = None
    ) -> None:
        self.account()
        self.num_running -= placed.wants_slot
        placed.stage = placed.stage if stage is None else stage
        placed.paused = placed.paused if paused is None else paused
        self.num_running += placed.wants_slot

    def forget(self, placed: PlacedTrajectory) -> None:
        """Drop it, here and on the engine."""
        self.account()
        self.num_running -= placed.wants_slot
        del self.trajectories[placed.id]
        self.engine.cancel(placed.id)

    def forget_kept(self, version: Version) -> None:
        """Drop what was handed over and is not released yet: the target has it."""
        for placed in list(self.trajectories.values()):
            if placed.partial.version == version and placed.stage is Stage.KEPT:
                self.forget(placed)

    def request(self, partial: PartialTrajectory, *, held: bool = False) -> Request:
        return Request(
            trajectory=partial.trajectory,
            version=partial.version,
            prompt=partial.prompt,
            sampling=self.sampling,
            seed=self.seed,
            prefix=tuple(partial.tokens),
            hold=partial.episode,
            turn_start=partial.turn_start,
            held=held,
        )

    def bring(self, placed: PlacedTrajectory, kv: bytes | None, *, anew: bool = True) -> bool:
        """Let the engine continue a trajectory; whether it took it. Else it has failed."""
        try:
            self.enter_engine(placed.partial, paused=placed.paused, kv=kv, anew=anew)
        except UserError as error:
            self.failed(placed.id, placed.fence, error)
            self.forget(placed)
            return False
        return True

    def enter_engine(
        self, partial: PartialTrajectory, *, paused: bool, kv: bytes | None, anew: bool = True
    ) -> None:
        """With its KV where there is any that the engine can read, else its tokens are read.

        Either way on the version that it was started with, by the digest of what it has sampled.
        `anew`: they may have been read before, and count as re-prefilled.
        """
        if kv is not None and self.engine.capabilities.kv_export:
            try:
                self.engine.import_trajectory(kv)
            except KvRefused:
                pass  # of other kernels than those here: its tokens are read
            else:
                return
        here = self.digests.get(partial.version)
        for segment in partial.segments:
            if segment.version == partial.version and here not in (None, segment.digest):
                raise ImportRefused(
                    f"trajectory {partial.trajectory} was sampled from version {partial.version} "
                    f"with the digest `{segment.digest}`, and `{here}` is here. Move it to an "
                    "instance of the same weights."
                )
        self.engine.submit(self.request(partial, held=paused))  # refused if the version is not here
        if anew:
            self.usage.reread_tokens += len(partial.prompt) + len(partial.tokens)

    def failed(self, trajectory: TrajectoryId, fence: Fence, error: Exception | str) -> None:
        """Tell the core; what the engine refused for good is not tried again."""
        # Reasons are counted: the same one must read the same for every trajectory.
        reason = one_line(error).replace(f"trajectory {trajectory}", "the trajectory")
        refused = isinstance(error, RequestRefused)
        event = ev.TrajectoryRefused if refused else ev.TrajectoryFailed
        self.report(event(trajectory, fence, reason))

    def account(self) -> None:
        """Time goes to the state that ends now; colocated training's is not rollout's."""
        now, usage = self.clock(), self.usage
        passed = 0.0 if usage.at is None or self.suspended else now - usage.at
        usage.at = now
        usage.slots_s += passed * self.slots
        usage.busy_s += passed * min(self.num_running, self.slots)
