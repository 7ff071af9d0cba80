"""The life cycle of instances: they join, report, crash, hang, slow down, leave and come back.

Every incarnation is a new process. A hang either freezes a process or cuts it off while it
works on; both wake as zombies, with late messages and unread mail. Devices that colocated
training takes are taken from every instance. Knows nothing of trajectories.
"""

from collections.abc import Callable

from dora_rl.core.protocol.commands import Dismiss, Expel
from dora_rl.core.protocol.events import Event, InstanceFailed, InstanceLeaving
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.instance import Instance
from dora_rl.simulator.network import Network
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.usage import Span

Process = tuple[Instance, int]  # an instance and its incarnation


class Fleet:
    """All instances, alive or not, and what befalls them."""

    def __init__(
        self,
        around: Surroundings,
        params: WorldParams,
        faults: Faults,
        network: Network,
        on_death: Callable[[Instance], None],
    ) -> None:
        self._around = around
        self._clock = around.clock
        self._faults = faults
        self._network = network
        self._on_death = on_death
        self._report_s = params.report_period_s
        self._save_s = params.save_period_s
        self._restart_s = params.restart_s
        self._repeats = faults.params.any_message
        self._holds = 0  # reasons why no instance may use its devices
        self._held_at = 0.0
        self.instances = [
            Instance(i, params.slots, params.version_slots, around, elastic=i >= params.instances)
            for i in range(params.instances + params.elastic_instances)
        ]
        for instance in self.instances:
            instance.emit = network.voice_of(instance)

    def begin(self) -> None:
        """Everybody joins; their reports are spread over the period, as without elastic ones."""
        own = sum(not instance.elastic for instance in self.instances)
        for instance in self.instances:
            self._boot(instance)
            first_s = self._report_s * (1 + instance.id % own / own)
            self._clock.after(first_s, self._tick, instance)

    def _boot(self, instance: Instance) -> None:
        if instance.alive:
            return
        instance.boot()
        if self._holds:
            instance.stop()
        process = (instance, instance.incarnation)
        params = self._faults.params
        self._expect("crash", params.crash_per_hour, self._crash, process)
        self._expect("hang", params.hang_per_hour, self._hang, process)
        self._expect("slow", params.slow_per_hour, self._slow, process)
        self._expect("leave", params.leave_per_hour, self._leave, process)

    def _tick(self, instance: Instance) -> None:
        self._clock.after(self._report_s, self._tick, instance)
        if not instance.alive or instance.frozen_until > self._clock.now:
            return
        if self._repeats:  # nobody answered: the message may be lost
            if not instance.told:
                instance.join()
            if instance.leaving:
                instance.emit(InstanceLeaving(instance.id, instance.incarnation))
        instance.report(self._clock.now - instance.saved_at >= self._save_s)

    # Devices

    def take_devices(self, taken: bool) -> None:
        """Generation stops everywhere, or one reason for that is gone."""
        now = self._clock.now
        self._holds += 1 if taken else -1
        if self._holds == (1 if taken else 0):
            self._around.usage.suspend(now, taken)
            for instance in self.instances:
                if instance.alive:
                    if taken:
                        instance.stop()
                    else:
                        instance.go()
            if taken:
                self._held_at = now
            elif self._around.recorder is not None:
                self._around.recorder.span(Span("suspend", None, self._held_at, now, 0))

    # Ends

    def _end(self, instance: Instance, back_in_s: float) -> None:
        instance.die()
        self._on_death(instance)
        self._clock.after(back_in_s, self._boot, instance)

    def expel(self, instance: Instance, command: Expel) -> None:
        self._end(instance, self._restart_s)

    def dismiss(self, instance: Instance, command: Dismiss) -> None:
        if not instance.leaving:
            raise WorldError(f"{command}, but the instance did not ask to leave")
        self._end(instance, self._faults.lasting_s("leave", self._faults.params.rejoin_s))

    # What befalls them

    def _expect(
        self, kind: str, per_hour: float, action: Callable[[Process], None], process: Process
    ) -> None:
        after_s = self._faults.next_after_s(kind, per_hour)
        if after_s is not None:
            self._clock.after(after_s, action, process)

    def _crash(self, process: Process) -> None:
        instance, incarnation = process
        if not _lives(process):
            return
        params = self._faults.params
        silent = self._faults.stream("crash").random() < params.silent_share
        how = "silently" if silent else "with notice"
        self._faults.note(self._clock.now, "crash", f"instance {instance.id}.{incarnation} {how}")
        notice: Event | None = None if silent else InstanceFailed(instance.id, incarnation, "crash")
        self._end(instance, self._restart_s)
        if notice is not None:
            self._network.report(notice)

    def _hang(self, process: Process) -> None:
        instance, incarnation = process
        if not _lives(process):
            return
        params = self._faults.params
        self._expect("hang", params.hang_per_hour, self._hang, process)
        if instance.cut_off:
            return
        lasting_s = self._faults.lasting_s("hang", params.hang_s)
        frozen = self._faults.stream("hang").random() >= params.partition_share
        how = "frozen" if frozen else "cut off"
        subject = f"instance {instance.id}.{incarnation} {how} for {lasting_s:.1f}s"
        self._faults.note(self._clock.now, "hang", subject)
        instance.cut_off = True
        if frozen:
            instance.frozen_until = self._clock.now + lasting_s
            instance.stop()
        self._clock.after(lasting_s, self._wake, (instance, incarnation, frozen))

    def _wake(self, argument: tuple[Instance, int, bool]) -> None:
        instance, incarnation, frozen = argument
        if not _lives((instance, incarnation)):
            return
        if frozen:
            instance.go()
        instance.report(False)
        self._network.reconnect(instance)

    def _slow(self, process: Process) -> None:
        instance, incarnation = process
        if not _lives(process):
            return
        params = self._faults.params
        self._expect("slow", params.slow_per_hour, self._slow, process)
        lasting_s = self._faults.lasting_s("slow", params.slow_s)
        subject = f"instance {instance.id}.{incarnation} for {lasting_s:.1f}s"
        self._faults.note(self._clock.now, "slow", subject)
        instance.set_slow(params.slow_factor)
        self._clock.after(lasting_s, self._recover, process)

    def _recover(self, process: Process) -> None:
        if _lives(process):
            process[0].set_slow(1.0)

    def _leave(self, process: Process) -> None:
        instance, incarnation = process
        if _lives(process) and not instance.leaving:
            self._faults.note(self._clock.now, "leave", f"instance {instance.id}.{incarnation}")
            instance.leaving = True
            instance.emit(InstanceLeaving(instance.id, incarnation))


def _lives(process: Process) -> bool:
    instance, incarnation = process
    return instance.alive and instance.incarnation == incarnation
