"""The audit's own picture of devices that both roles use: training never begins on lent ones.

Built from events and commands alone. It must not look into the orchestrator.
"""

from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.types import InstanceId


class Devices:
    SAVED = ("_elastic", "_lent")
    WIRED = ("_breaches",)

    def __init__(self, breaches: Breaches) -> None:
        self._breaches = breaches
        self._elastic: dict[InstanceId, int] = {}  # incarnations that live on the trainer's devices
        self._lent: dict[InstanceId, bool] = {}  # of them, who was woken; whether told to sleep

    def joined(self, event: e.InstanceJoined) -> None:
        if event.incarnation <= self._elastic.get(event.instance, -1):
            return
        self._lent.pop(event.instance, None)
        self._elastic.pop(event.instance, None)
        if event.elastic:
            self._elastic[event.instance] = event.incarnation

    def wake(self, command: c.Wake) -> None:
        if self._elastic.get(command.instance) == command.incarnation:
            self._lent[command.instance] = False

    def sleep(self, command: c.Sleep) -> None:
        if command.instance in self._lent:
            self._lent[command.instance] = True

    def slept(self, event: e.InstanceSlept) -> None:
        """Its devices are the trainer's again; unless that was said before it was woken."""
        if self._lent.get(event.instance):
            self.gone(event.instance, event.incarnation)

    def gone(self, instance: InstanceId, incarnation: int) -> None:
        if self._elastic.get(instance) == incarnation:
            self._lent.pop(instance, None)

    def train(self, command: c.Train) -> None:
        if self._lent:
            names = ", ".join(map(str, sorted(self._lent)))
            self._breaches.add(
                Promise.DEVICES, f"Train of step {command.step} while rollout has those of {names}"
            )
