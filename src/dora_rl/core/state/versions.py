"""The life cycle of a version, and the leases that keep its weights.

A lease is held by name: by a group that is not terminal, by an instance that holds the
weights, by a pin from outside, and by being the newest. Weights are deleted when
the last holder is gone, never by counting steps.
"""

from dataclasses import dataclass, field

from dora_rl.core.protocol.types import (
    VERSION_MOVES,
    GroupId,
    InstanceId,
    Version,
    VersionState,
    check_move,
)


@dataclass(slots=True)
class VersionRecord:
    version: Version
    digest: str
    state: VersionState = VersionState.PUBLISHED
    groups: set[GroupId] = field(default_factory=set)
    instances: set[InstanceId] = field(default_factory=set)
    pins: set[str] = field(default_factory=set)
    vacated: bool = False  # its work is done and its hosts have been told to let it go

    @property
    def leased(self) -> bool:
        return bool(self.groups or self.instances or self.pins)

    def move(self, new: VersionState) -> None:
        self.state = check_move(VERSION_MOVES, self.state, new, f"version {self.version}")


@dataclass(slots=True)
class Versions:
    """All versions that are not retired; `newest` is -1 before the first publication."""

    live: dict[Version, VersionRecord] = field(default_factory=dict)
    newest: Version = -1
    digests: dict[Version, str] = field(default_factory=dict)  # of all that were ever published

    def publish(self, version: Version, digest: str) -> None:
        previous = self.live.get(self.newest)
        if previous is not None:
            previous.move(VersionState.DRAINING)
        self.live[version] = VersionRecord(version, digest)
        self.digests[version] = digest
        self.newest = version

    def activate(self, version: Version) -> None:
        """The newest version is served now, by a verified install."""
        record = self.live[version]
        if record.state is VersionState.PUBLISHED:
            record.move(VersionState.ACTIVE)

    def retire_unleased(self) -> list[Version]:
        """Retire every version without a lease, and say which weights may be deleted."""
        gone = [
            version
            for version, record in self.live.items()
            if version != self.newest and not record.leased
        ]
        for version in gone:
            self.live.pop(version).move(VersionState.RETIRED)
        return gone
