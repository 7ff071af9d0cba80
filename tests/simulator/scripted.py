"""A stand-in for the core that says what a test tells it to, and a world of round figures."""

from collections.abc import Callable, Sequence
from typing import Any

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import BatchGroup
from dora_rl.simulator.cost_parameters import Device, Efficiency, Model
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.runs import RUNNING
from dora_rl.simulator.workload import TrajectoryShape, Turn
from dora_rl.simulator.world import World

# A decode step takes 0.01 s whatever the batch: everything else is far below the overhead.
MODEL = Model(parameters=1e6, layers=1, heads=1, kv_heads=1, head_dim=100)
DEVICE = Device(
    flops=1e18,
    memory_bytes=1e9,
    memory_bandwidth=1e18,
    interconnect_bandwidth=1e9,
    host_bandwidth=1e9,
)
EFFICIENCY = Efficiency(decode_overhead_s=0.01, transfer_efficiency=1)
STEP_S = 0.01
# KV of one token is 400 bytes: moving a token takes 0.4 microseconds.
KV_BYTES = 400


def capacity_of(tokens: int) -> Efficiency:
    """Efficiency that leaves room for so many KV tokens beside one version's weights."""
    share = (MODEL.weight_bytes + (tokens + 0.5) * KV_BYTES) / DEVICE.memory_bytes
    return EFFICIENCY.model_copy(update={"kv_memory_fraction": share})


def shape(*turns: int | tuple[int, float, int], prompt: int = 10, reward_s: float = 0.0) -> Any:
    """Turns as (tokens, environment_s, observation_tokens), or just tokens."""
    whole = [turn if isinstance(turn, tuple) else (turn, 0.0, 0) for turn in turns]
    return TrajectoryShape(prompt, tuple(Turn(*turn) for turn in whole), reward_s)


class Shapes:
    """The shapes that a test wants, by trajectory."""

    def __init__(self, shapes: dict[int, Any] | None = None, group_size: int = 1) -> None:
        self.shapes = shapes or {}
        self.group_size = group_size

    def trajectory(self, group: int, member: int, step: int = 0) -> TrajectoryShape:
        found: TrajectoryShape = self.shapes.get(group * self.group_size + member, shape(100))
        return found


Rule = Callable[[Any], Sequence[Command]]


class Script:
    """Answers events by rule, and says lines at their times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.rules: dict[type, list[Rule]] = {}
        self.lines: list[tuple[float, tuple[Command, ...]]] = []

    def on(self, kind: type, rule: Rule) -> None:
        self.rules.setdefault(kind, []).append(rule)

    def at(self, time: float, *commands: Command) -> None:
        self.lines.append((time, commands))
        self.lines.sort(key=lambda line: line[0])

    def handle(self, now: float, event: Event) -> list[Command]:
        self.events.append((now, event))
        out: list[Command] = []
        for rule in self.rules.get(type(event), ()):
            out.extend(rule(event))
        if isinstance(event, ev.TimerFired):
            while self.lines and self.lines[0][0] <= now:
                out.extend(self.lines.pop(0)[1])
        if self.lines and (isinstance(event, ev.TimerFired) or len(self.events) == 1):
            out.append(cmd.SetTimer(self.lines[0][0]))
        return out

    def seen(self, kind: type) -> list[tuple[float, Any]]:
        return [(now, event) for now, event in self.events if isinstance(event, kind)]

    def last(self, kind: type) -> Any:
        return self.seen(kind)[-1][1]


def installing(version: int = 0) -> Script:
    """A script that puts a version on every instance that joins; it is there at 0.51 s."""
    script = Script()
    script.on(ev.InstanceJoined, lambda e: [cmd.Install(e.instance, e.incarnation, version)])
    return script


def build(
    script: Any,
    shapes: dict[int, Any] | None = None,
    *,
    group_size: int = 1,
    seed: int = 0,
    recorder: Any = None,
    steady_version: int | None = None,
    **params: Any,
) -> World:
    """A world with one trainer device and round figures."""
    known = {
        "instances": 1,
        "slots": 4,
        "train_devices": 1,
        "model": MODEL,
        "device": DEVICE,
        "efficiency": EFFICIENCY,
        "report_period_s": 1000.0,
    }
    return World(
        script,
        WorldParams(**(known | params)),
        Shapes(shapes, group_size),
        seed,
        group_size=group_size,
        recorder=recorder,
        steady_version=steady_version,
    )


def publish_next(script: Script, step: int, *trajectories: int, at: float) -> None:
    """Train on whole trajectories, one group each, and publish the version that follows."""
    groups = tuple(BatchGroup(t, 0, (t,)) for t in trajectories)
    script.at(at, cmd.Train(step, groups))
    script.on(ev.BatchTrained, lambda e: [cmd.Publish(e.step + 1)] if e.step == step else [])


def check_memory(world: World) -> None:
    """The engines' counters say what their runs say."""
    for instance in world.instances:
        running = [run for run in instance.runs.values() if run.state == RUNNING]
        grown = {run.fence: instance.steps - run.joined for run in running}
        assert instance.size == len(running) <= instance.slots
        assert instance.context == sum(r.context + grown[r.fence] for r in running)
        held = [run for run in instance.runs.values() if run.held]
        own = sum(r.context + grown.get(r.fence, 0) - r.debt - r.prompt for r in held)
        prompts = {run.group: run.prompt for run in held}
        assert instance.used == own + sum(prompts.values())
        assert set(instance.prompts) == set(prompts)
        counted: dict[int, int] = {}
        for run in running:
            counted[run.version] = counted.get(run.version, 0) + 1
        assert instance.by_version == counted
        assert instance.accounted == instance.size
