"""Weights on instances: install, evict, sleep, and carrying running work over to new weights.

Checks what it is told, as an engine that trusts nobody would: weights exist, they fit, nothing
runs on what is dropped. A bug of the core raises `WorldError`; work that the core has given up
(its cancel was lost on the way) is no obstacle. Knows nothing of what the core believes.
"""

from collections.abc import Callable

from dora_rl.core.protocol.commands import Evict, Install, Sleep, Wake
from dora_rl.core.protocol.events import (
    InstallFailed,
    InstanceSlept,
    InstanceWoke,
    VersionEvicted,
    VersionInstalled,
)
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.instance import Instance, Loading
from dora_rl.simulator.runs import FROZEN, KEPT, QUEUED, RUNNING, Run
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.trainer import Store, digest_of
from dora_rl.simulator.usage import Span


class Hosting:
    """Performs `Install`, `Evict`, `Sleep` and `Wake` on any instance."""

    def __init__(
        self,
        around: Surroundings,
        store: Store,
        faults: Faults,
        disowned: set[int],
        carry_reprefill: bool,
        devices_changed: Callable[[], None],
    ) -> None:
        """`devices_changed` is called when training has got devices, or has given some back."""
        self._around = around
        self._clock = around.clock
        self._store = store
        self._faults = faults
        self._disowned = disowned
        self._carry_reprefill = carry_reprefill
        self._devices_changed = devices_changed

    def install(self, instance: Instance, command: Install) -> None:
        version, evict = command.version, command.evict
        if version in instance.installing:
            return
        if evict is not None and not instance.holds(evict):
            evict = None
        if version in instance.versions:
            if evict is not None and evict != version:
                self._drop(instance, evict)
            self._confirm(instance, version)
            return
        if not self._may_install(instance, command, evict):
            return
        loading = Loading(evict, command.carry and evict is not None, self._clock.now)
        instance.installing[version] = loading
        if loading.carry:
            instance.stop()
        duration_s = self._around.costs.install_time() * instance.slow
        argument = (instance, instance.incarnation, version, loading)
        self._clock.after(duration_s, self._installed, argument)

    def evict(self, instance: Instance, command: Evict) -> None:
        version = command.version
        if instance.holds(version) and not self._drop(instance, version):
            return
        instance.emit(VersionEvicted(instance.id, instance.incarnation, version))

    def sleep(self, instance: Instance, command: Sleep) -> None:
        if instance.switching:
            return
        if instance.asleep:
            instance.emit(InstanceSlept(instance.id, instance.incarnation))
            return
        for version in [*instance.versions, *instance.installing]:
            if not self._drop(instance, version):
                return
        self._switch(instance, asleep=True)

    def wake(self, instance: Instance, command: Wake) -> None:
        if instance.switching:
            return
        if not instance.asleep:
            instance.emit(InstanceWoke(instance.id, instance.incarnation))
            return
        self._switch(instance, asleep=False)

    def _switch(self, instance: Instance, *, asleep: bool) -> None:
        instance.switching = True
        if not asleep:
            instance.set_asleep(False)  # training loses them at once, rollout gets them later
            self._devices_changed()
        duration_s = self._around.costs.switch_time() * instance.slow
        argument = (instance, instance.incarnation, asleep, self._clock.now)
        self._clock.after(duration_s, self._switched, argument)

    def _switched(self, argument: tuple[Instance, int, bool, float]) -> None:
        instance, incarnation, asleep, start = argument
        if not instance.alive or instance.incarnation != incarnation:
            return
        now = self._clock.now
        if instance.frozen_until > now:
            self._clock.at(instance.frozen_until, self._switched, argument)
            return
        instance.switching = False
        self._around.facts.switches += 1
        if asleep:
            instance.set_asleep(True)
            self._devices_changed()
        if self._around.recorder is not None:
            kind = "sleep" if asleep else "wake"
            self._around.recorder.span(Span(kind, instance.id, start, now, 0))
        done = InstanceSlept if asleep else InstanceWoke
        instance.emit(done(instance.id, incarnation))

    def _may_install(self, instance: Instance, command: Install, evict: int | None) -> bool:
        version = command.version
        if instance.asleep or instance.switching:
            return refuse(instance, f"{command}, but training has the devices")
        if version not in self._store.versions:
            return refuse(instance, f"{command} of a version that is not in the store")
        held = {*instance.versions, *instance.installing} - {evict}
        if len(held) >= instance.version_slots:
            return refuse(instance, f"{command} on top of versions {sorted(held)}: too many")
        if evict is not None and not command.carry:
            return self._may_drop(instance, evict)
        return True

    def _may_drop(self, instance: Instance, version: int) -> bool:
        using = [*instance.using(version), *instance.awaited(version)]
        obstacles = [run for run in using if run.fence not in self._disowned]
        if obstacles:
            shown = [(run.trajectory, run.fence) for run in obstacles[:5]]
            return refuse(
                instance,
                f"version {version} is dropped on instance {instance.id} under work that runs "
                f"there or moves there: (trajectory, fence) {shown}",
            )
        return True

    def _drop(self, instance: Instance, version: int) -> bool:
        loading = instance.installing.pop(version, None)
        if loading is not None:
            if loading.carry:
                instance.go()
            return True
        if not self._may_drop(instance, version):
            return False
        for run in [r for r in instance.runs.values() if r.version == version]:
            if run.state == KEPT or run.fence in self._disowned:
                instance.remove(run)
        del instance.versions[version]
        return True

    def _installed(self, argument: tuple[Instance, int, int, Loading]) -> None:
        instance, incarnation, version, loading = argument
        if instance.incarnation != incarnation or instance.installing.get(version) is not loading:
            return
        now = self._clock.now
        if instance.frozen_until > now:
            self._clock.at(instance.frozen_until, self._installed, argument)
            return
        del instance.installing[version]
        params, subject = self._faults.params, f"version {version} on instance {instance.id}"
        if self._faults.strikes(now, "failed_install", params.failed_install, subject):
            if loading.carry:
                instance.go()
            instance.emit(InstallFailed(instance.id, incarnation, version, "load_failed"))
            return
        digest = digest_of(version)
        if self._faults.strikes(now, "wrong_digest", params.wrong_digest, subject):
            digest = f"corrupt-{digest}"
        if loading.carry and loading.evict is not None:
            self._carry(instance, loading.evict, version, digest)
            instance.go()
        elif loading.evict in instance.versions and not self._drop(instance, loading.evict):
            return
        instance.versions[version] = digest
        self._around.facts.installs += 1
        self._around.facts.install_s += now - loading.start
        if self._around.recorder is not None:
            self._around.recorder.span(Span("install", instance.id, loading.start, now, version))
        self._confirm(instance, version)

    def _confirm(self, instance: Instance, version: int) -> None:
        digest = instance.versions[version]
        instance.emit(VersionInstalled(instance.id, instance.incarnation, version, digest))

    def _carry(self, instance: Instance, old: int, new: int, digest: str) -> None:
        """Running work continues under the new weights, in a new segment."""
        instance.versions.pop(old, None)
        instance.successors[old] = new
        again: list[Run] = []
        for run in [r for r in instance.runs.values() if r.version == old]:
            if run.state == FROZEN:
                raise WorldError(
                    f"version {old} is replaced on instance {instance.id} while trajectory "
                    f"{run.trajectory} moves away"
                )
            if run.state == RUNNING:
                instance.leave(run)
                again.append(run)
            run.close_segment()
            run.version, run.digest = new, digest
            if self._carry_reprefill and run.state != QUEUED:
                lost = run.context - run.debt if run.on_host else instance.drop(run)
                run.on_host = False
                run.debt = run.context
                self._around.facts.reprefilled_tokens += lost
        instance.line_up_first(again)


def refuse(instance: Instance, message: str) -> bool:
    """Raise, unless the core has disowned this process already; then the command is void."""
    if instance.expelled >= instance.incarnation:
        return False
    raise WorldError(message)
