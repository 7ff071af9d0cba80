"""A run continues after it was stopped or killed: from what the ledger has."""

from collections.abc import Iterator

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.events import InstanceStopped
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.driver import Driver
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.records.ledger_writer import (
    batches_to_redo,
    decode_batch,
    decode_buffered,
    saved_prefixes,
)
from dora_rl.samples import SampleRef
from dora_rl.store.ledger import Ledger


def restore_driver(driver: Driver, ledger: Ledger) -> None:
    """Give the driver what it held."""
    live = driver.outstanding
    for name, content in ledger.payloads():
        if name in live:  # the others are trained, and kept until a checkpoint has their step
            driver.buffer.put(decode_buffered(content))
    for prefix in saved_prefixes(ledger).values():
        driver.keep_prefix(prefix)


def ask_again(driver: Driver, orchestrator: Orchestrator) -> dict[int, int]:
    """Ask again for what was not answered; the incarnations that instances start with."""
    state = orchestrator.state
    for name, instance in sorted(state.fleet.instances.items()):
        driver.post(InstanceStopped(name, instance.incarnation))
    for command in orchestrator.unanswered():
        driver.perform(command)
    return {name: last + 1 for name, last in state.fleet.ended.items()}


def steps_to_redo(ledger: Ledger, step: int) -> Iterator[ms.Redo]:
    """What a trainer that starts from the last checkpoint takes again, to be at `step`."""
    for row in batches_to_redo(ledger):
        if row.step >= step:
            return
        batch = decode_batch(row)
        samples = tuple(
            _sample(ledger, name) for group in batch.groups for name in group.trajectories
        )
        yield ms.Redo(row.step, tuple(group.group for group in batch.groups), samples)


def _sample(ledger: Ledger, name: int) -> SampleRef:
    content = ledger.payload(name)
    item = None if content is None else decode_buffered(content)
    if item is None or item.reward is None:
        raise RunFailed(f"trajectory {name} was trained on, and the ledger has it no more")
    return SampleRef(trajectory=item.trajectory, reward=item.reward, parts=item.parts)
