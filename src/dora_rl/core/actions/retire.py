"""Retire a version once nothing leases it: hosts let go of it, and its weights are deleted."""

from dora_rl.core.actions import host
from dora_rl.core.protocol.commands import Delete
from dora_rl.core.state.run import State


def retire(state: State) -> None:
    """Let go of versions whose work is done, and delete what nobody leases."""
    versions = state.versions
    for version, record in versions.live.items():
        if (
            version != versions.newest
            and not record.vacated
            and version not in state.work.unfinished
        ):
            record.vacated = True
            if state.paradigm.pins_version:
                for instance_id in sorted(record.instances):
                    host.vacate(state, state.fleet.instances[instance_id], version)
    if state.lease_dropped:
        state.lease_dropped = False
        for version in versions.retire_unleased():
            state.fleet.forget_version(version)
            state.emit(Delete(version))
