"""Which versions are live in an engine: what is refused when one comes or goes. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.errors import ImportRefused, VersionRefused
from dora_rl.engines.wire import Export


@dataclass(slots=True)
class VersionSlots:
    """The digests of the live versions, at most `count` of them."""

    count: int
    digests: dict[Version, str] = field(default_factory=dict)

    def has(self, version: Version, digest: str, directory: Path) -> bool:
        """Whether it is live; refused if it is so with other weights."""
        here = self.digests.get(version)
        if here is not None and here != digest:
            raise VersionRefused(
                f"version {version} is here with the digest `{here}`: `{directory}` has "
                f"`{digest}`. A version never changes; give the weights a new one."
            )
        return here is not None

    def to_evict(self, version: Version, evict: Version | None) -> Version | None:
        """What must go for this version: `evict`, if no slot is free. Refused if that is not here.

        Nobody checked yet that it may go: see `check_unused`.
        """
        if len(self.digests) < self.count:
            return None
        if evict not in self.digests:
            raise VersionRefused(
                f"all {self.count} version slots are taken, by versions {sorted(self.digests)}. "
                f"Evict one to install version {version}."
            )
        return evict

    def check_unused(self, version: Version, trajectories: Sequence[TrajectoryId]) -> None:
        """Refuse to evict a version that these trajectories of it are here for."""
        if trajectories:
            raise VersionRefused(
                f"version {version} has {len(trajectories)} trajectories here, "
                f"`{trajectories[0]}` among them. Let them end, or move or cancel them first."
            )

    def digest(self, version: Version) -> str:
        """Of a live version; another one is refused."""
        try:
            return self.digests[version]
        except KeyError:
            raise VersionRefused(
                f"version {version} is not installed; here are {sorted(self.digests)}. "
                "Install it first."
            ) from None

    def check_import(self, export: Export) -> None:
        """Refuse a trajectory of weights that are not live here."""
        here = self.digests.get(export.version)
        if here != export.digest:
            which = f"has the digest `{here}` here" if here else "is not installed here"
            raise ImportRefused(
                f"trajectory {export.trajectory} was sampled from version {export.version} with "
                f"the digest `{export.digest}`, which {which}. Move it to an instance of the "
                "same weights."
            )
