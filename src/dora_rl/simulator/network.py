"""How messages get from the core to the world and back.

Without faults a message arrives once and at once. With them it may be lost, doubled or late.
Commands to one instance, or to the trainer, keep their order, as the core may rely on: a late
one holds up those behind it, and a doubled one comes twice in a row. Events, and questions to
services, overtake each other freely. A process that is cut off reads its mail when it is back,
and what it said in the meantime leaves then.
"""

from collections.abc import Callable
from typing import Any

from dora_rl.core.protocol.events import Event
from dora_rl.simulator.clock import Clock
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.instance import Instance

Receive = Callable[[Instance, Any], None]


class Network:
    """Carries events into `deliver`, and commands to whoever performs them."""

    __slots__ = ("_clock", "_deliver", "_faults", "_held_up_until", "_lossy", "faulty")

    def __init__(self, clock: Clock, faults: Faults, deliver: Callable[[Event], None]) -> None:
        self._clock = clock
        self._faults = faults
        self._deliver = deliver
        self._lossy = faults.params.any_message
        self._held_up_until: dict[object, float] = {}
        self.faulty = faults.params.any

    # To the core

    def voice_of(self, instance: Instance) -> Callable[[Event], None]:
        """What an instance reports its events with."""
        if not self.faulty:
            return self._deliver

        def emit(event: Event) -> None:
            if instance.cut_off:
                instance.outbox.append(event)
            else:
                self.report(event)

        return emit

    def report(self, event: Event) -> None:
        """Send an event to the core."""
        if not self._lossy:
            self._deliver(event)
            return
        for delay_s in self._faults.deliveries(self._clock.now, event):
            if delay_s:
                self._clock.after(delay_s, self._deliver, event)
            else:
                self._deliver(event)

    # From the core

    def send(self, channel: object, perform: Callable[[Any], None], command: Any) -> None:
        """Carry a command to the one receiver behind `channel`; None keeps no order."""
        self._carry(channel, perform, command, command)

    def _carry(
        self, channel: object, perform: Callable[[Any], None], letter: Any, command: object
    ) -> None:
        if not self._lossy:
            perform(letter)
            return
        now = self._clock.now
        for delay_s in self._faults.deliveries(now, command):
            held_up = self._held_up_until.get(channel, -1.0)
            at = max(now + delay_s, held_up)
            if at <= now and held_up < now:
                perform(letter)
                continue
            if channel is not None:
                self._held_up_until[channel] = at
            self._clock.at(at, perform, letter)

    def send_to(self, instance: Instance, incarnation: int, receive: Receive, command: Any) -> None:
        """Carry a command to one process; if that process is gone, it is void."""
        if self.faulty:
            letter = (instance, incarnation, receive, command)
            self._carry(instance.id, self._hand_over, letter, command)
        elif instance.alive and instance.incarnation == incarnation:
            receive(instance, command)

    def _hand_over(self, letter: tuple[Instance, int, Receive, Any]) -> None:
        instance, incarnation, receive, command = letter
        if not instance.alive or instance.incarnation != incarnation:
            return
        if instance.cut_off:
            instance.mailbox.append((self._hand_over, letter))
        else:
            instance.told = True
            receive(instance, command)

    def reconnect(self, instance: Instance) -> None:
        """A process is back: what it said leaves now, what was said to it arrives."""
        instance.cut_off = False
        said, instance.outbox = instance.outbox, []
        for event in said:
            self.report(event)
        mail, instance.mailbox = instance.mailbox, []
        for hand_over, letter in mail:
            hand_over(letter)
