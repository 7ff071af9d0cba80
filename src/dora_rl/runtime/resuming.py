"""A stopped run goes on: what was under way is put back, and asked for anew."""

from dora_rl.core.events import InstanceFailed
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.runtime.driver import Driver
from dora_rl.runtime.leftover import Leftover

_STOPPED = "the run was stopped"


def put_back(driver: Driver, leftover: Leftover) -> None:
    """Give the driver what it held."""
    for item in leftover.items:
        driver.shelf.put(item)
    for prefix in leftover.prefixes:
        driver.prefixes[prefix.trajectory] = prefix


def go_on(driver: Driver, orchestrator: Orchestrator) -> dict[int, int]:
    """Ask again for what was not answered; the incarnations that instances start with."""
    state = orchestrator.state
    for name, instance in sorted(state.fleet.instances.items()):
        driver.post(InstanceFailed(name, instance.incarnation, _STOPPED))
    for command in orchestrator.outstanding():
        driver.perform(command)
    return {name: last + 1 for name, last in state.fleet.ended.items()}
