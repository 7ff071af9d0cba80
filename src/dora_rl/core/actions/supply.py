"""Supplement: how new groups enter, and where their prompts come from.

As many as the paradigm wants, the deadline inequality admits, the run can still train on, and
the prompt stream has given.
"""

from dora_rl.core.policy.admission import schedulable
from dora_rl.core.protocol.commands import FetchPrompts
from dora_rl.core.protocol.paradigms import Pipeline
from dora_rl.core.protocol.types import Version
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait


def supplement(state: State) -> None:
    """Admit new groups on the newest version, as many as the paradigm wants and K allows."""
    work, slots, newest = state.work, state.fleet.slots, state.versions.newest
    if newest < 0 or not slots or state.suspended:
        return
    outstanding = len(work.groups)
    unbatched = outstanding - len(state.trainer.batch)
    stalled = state.trainer.stalled_since is not None
    pipeline = Pipeline(outstanding, unbatched, work.num_ready, slots - work.demand, stalled)
    wanted = state.paradigm.room(pipeline, state.settings)
    if wanted > 0:
        admit(state, newest, wanted)


def admit(state: State, version: Version, wanted: int) -> int:
    """Start up to `wanted` groups on a version, within the bound, the run and the prompts."""
    work, settings, step = state.work, state.settings, state.trainer.step
    room = min(
        wanted,
        schedulable(
            work.pending, version, state.next_step, settings.groups_per_step, state.staleness
        ),
    )
    if settings.max_steps:
        useful = (settings.max_steps - step) * settings.groups_per_step
        room = min(room, useful - work.num_outstanding)
    if room <= 0:
        return 0
    admitted = min(room, work.backlog)
    record = state.versions.live[version]
    for _ in range(admitted):
        group = work.admit(version)
        if state.paradigm.pins_version:
            record.groups.add(group.id)
    if admitted:
        record.vacated = False
        state.unplaced.add(version)
    _fetch(state, room - admitted)
    return admitted


def _fetch(state: State, missing: int) -> None:
    """Keep a batch of prompts in hand."""
    work = state.work
    want = max(missing, state.settings.groups_per_step)
    if state.fetching is None and not work.exhausted and work.backlog < want:
        state.fetching = work.prompts
        state.fetch_attempts = 0
        send_fetch(state, want)


def send_fetch(state: State, count: int) -> None:
    state.fetch_attempts += 1
    first = state.work.prompts
    state.timers.set(
        state.now + state.settings.prompt_timeout_s, Wait.PROMPTS, first, state.fetch_attempts
    )
    state.emit(FetchPrompts(first, count))
