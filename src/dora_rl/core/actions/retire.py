"""Retire a version once nothing leases it: hosts let go of it, and its weights are deleted."""

from dora_rl.core.actions import host
from dora_rl.core.protocol.commands import Delete
from dora_rl.core.state.run import State


def retire(state: State) -> None:
    """Let go of versions whose work is done, and delete what nobody leases."""
    versions, newest, unfinished = state.versions, state.versions.newest, state.work.unfinished
    for version, record in versions.live.items():
        if version not in unfinished and version != newest and not record.vacated:
            record.vacated = True
            if state.paradigm.pins_version:
                for instance_id in sorted(record.instances):
                    host.vacate(state, state.fleet.instances[instance_id], version)
    if state.lease_dropped:
        state.lease_dropped = False
        for version in versions.retire_unleased():
            state.fleet.forget_version(version)
            state.emit(Delete(version))
