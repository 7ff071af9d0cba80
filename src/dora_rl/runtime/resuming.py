"""A stopped run goes on: what was under way is put back, and asked for anew."""

from dora_rl.core.events import InstanceFailed
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.runtime.driver import Driver
from dora_rl.runtime.leftover import Leftover

_STOPPED = "the run was stopped"


def go_on(driver: Driver, orchestrator: Orchestrator, leftover: Leftover) -> dict[int, int]:
    """Put back what the driver held and ask again; the incarnations that instances start with."""
    for item in leftover.items:
        driver.shelf.put(item)
    for prefix in leftover.prefixes:
        driver.prefixes[prefix.trajectory] = prefix
    state = orchestrator.state
    for name, instance in sorted(state.fleet.instances.items()):
        driver.post(InstanceFailed(name, instance.incarnation, _STOPPED))
    for command in orchestrator.outstanding():
        driver.perform(command)
    return {name: last + 1 for name, last in state.fleet.ended.items()}
