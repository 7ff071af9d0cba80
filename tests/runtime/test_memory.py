"""Memory that runs short: what is read of it, when it is short, and how a run ends then."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dora_rl import cli
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, InstanceFailed
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.memory import MB, Left, Watch, left, memory_watch, oom_kills
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import execute
from dora_rl.runtime.launchers import wall_clock
from dora_rl.runtime.launchers.local import launcher as local
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.local.site import Site
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.runtime.records.run_files import Ending, RunFiles
from tests.runtime.harness import PROMPTS, assert_sound, records, settings, trained
from tests.runtime.test_local import ALONE, LOCAL, Killer, has_trained

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
PLENTY = Left(1 << 40, "on this machine")
LITTLE = Left(100 * MB, "on this machine")
few = hypothesis_settings(max_examples=30)  # each makes a tree of files


# What is read


class Group(NamedTuple):
    """Bytes, as the kernel has them; no limit is `max`."""

    limit: int | None = None
    used: int = 0
    inactive: int = 0
    active: int = 0
    mapped: int = 0


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_v2(directory: Path, group: Group) -> None:
    write(directory / "memory.max", "max" if group.limit is None else str(group.limit))
    write(directory / "memory.current", str(group.used))
    cache = (f"active_file {group.active}", f"inactive_file {group.inactive}")
    write(directory / "memory.stat", "anon 1", f"file_mapped {group.mapped}", *cache)


def write_v1(directory: Path, group: Group) -> None:
    """Beside the hierarchical numbers stand those of the group alone, which must not be taken."""
    limit = 0x7FFFFFFFFFFFF000 if group.limit is None else group.limit
    write(directory / "memory.limit_in_bytes", str(limit))
    write(directory / "memory.usage_in_bytes", str(group.used))
    own = ("inactive_file 7", "active_file 7", "mapped_file 7")
    names = {"inactive_file": group.inactive, "active_file": group.active}
    rows = [
        f"total_{name} {value}" for name, value in {**names, "mapped_file": group.mapped}.items()
    ]
    write(directory / "memory.stat", *own, *rows)


def machine(root: Path, available_kb: int) -> None:
    write(
        root / "proc/meminfo",
        f"MemTotal:       {10**9} kB",
        "MemFree:        3 kB",
        f"MemAvailable:   {available_kb} kB",
        "HugePages_Total:       0",
    )


def within(root: Path, mount: str, *own: str) -> None:
    write(root / "proc/self/cgroup", *own)
    write(root / "proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw", mount)


def test_nothing_is_known_where_there_is_no_linux(tmp_path: Path) -> None:
    assert left(tmp_path) is None
    assert oom_kills(tmp_path) is None


def test_this_machine_says_what_is_left() -> None:
    found = left()
    assert found is not None and 0 < found.size < 1 << 50
    assert oom_kills() is not None


def test_the_machine_limits_where_no_group_does(tmp_path: Path) -> None:
    machine(tmp_path, 5 * 1024)
    assert left(tmp_path) == Left(5 * MB, "on this machine")


@pytest.mark.parametrize(
    ("group", "room"),
    [
        (Group(limit=100, used=70), 30),
        (Group(limit=100, used=70, inactive=5, active=20), 55),
        (Group(limit=100, used=70, inactive=5, active=20, mapped=8), 47),
        (Group(limit=100, used=70, inactive=5, active=20, mapped=60), 35),
        (Group(limit=100, used=103), 0),  # usage may pass the limit for a moment
        (Group(limit=0, used=0), 0),
    ],
)
def test_room_is_what_is_not_used_and_the_cache_that_nobody_maps(
    group: Group, room: int, tmp_path: Path
) -> None:
    machine(tmp_path, 10**6)
    within(tmp_path, V2_MOUNT, "0::/user/run")
    write_v2(tmp_path / "sys/fs/cgroup/user/run", group)
    assert left(tmp_path) == Left(room, "in the cgroup `/user/run`")


sizes = st.integers(min_value=0, max_value=10**12)


@few
@given(
    chain=st.lists(st.tuples(st.none() | sizes, sizes).map(lambda pair: Group(*pair)), max_size=4),
    available_kb=sizes,
    v2=st.booleans(),
)
def test_the_tightest_of_all_ancestors_counts(
    chain: list[Group], available_kb: int, v2: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        machine(root, available_kb)
        own = "/" + "/".join(f"g{depth}" for depth in range(len(chain)))
        if v2:
            within(root, V2_MOUNT, f"0::{own}")
        else:
            within(root, V1_MOUNT, f"4:cpu,memory:{own}", "0::/")
        directory = root / ("sys/fs/cgroup" if v2 else "sys/fs/cgroup/memory")
        for depth, group in enumerate(chain):
            directory /= f"g{depth}"
            (write_v2 if v2 else write_v1)(directory, group)
        found = left(root)
    rooms = [max(0, group.limit - group.used) for group in chain if group.limit is not None]
    assert found is not None
    assert found.size == min([available_kb * 1024, *rooms])


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/ab /sys")
    within(tmp_path, mount, "4:memory:/docker/ab/inner")
    memory = tmp_path / "sys/fs/cgroup/memory"
    write_v1(memory / "inner", Group(limit=90, used=10))
    write_v1(memory, Group(limit=60, used=10))
    assert left(tmp_path) == Left(50, "in the cgroup `/docker/ab`")


@pytest.mark.parametrize("own", ["/../elsewhere", "/kubepods/pod1"])
def test_a_group_that_no_mount_shows_is_limited_by_the_top(own: str, tmp_path: Path) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /machine /sys")
    within(tmp_path, mount, f"0::{own}")
    write_v2(tmp_path / "sys/fs/cgroup", Group(limit=60, used=10))
    found = left(tmp_path)
    assert found is not None and found.size == 50


def test_the_mount_that_shows_the_group_is_read(tmp_path: Path) -> None:
    """Not somebody else's; and the kernel escapes spaces."""
    others = "30 23 0:28 /other /mnt rw - cgroup2 none rw"
    mine = "31 23 0:28 /mine /my\\040groups rw - cgroup2 none rw"
    write(tmp_path / "proc/self/mountinfo", others, mine)
    write(tmp_path / "proc/self/cgroup", "0::/mine/run")
    write_v2(tmp_path / "mnt", Group(limit=1))
    write_v2(tmp_path / "my groups/run", Group(limit=20))
    assert left(tmp_path) == Left(20, "in the cgroup `/mine/run`")


def test_kills_are_counted_as_near_as_can_be(tmp_path: Path) -> None:
    write(tmp_path / "proc/vmstat", "nr_free_pages 1", "oom_kill 9")
    assert oom_kills(tmp_path) == 9
    within(tmp_path, V2_MOUNT, "0::/a/b")
    assert oom_kills(tmp_path) == 9
    write(tmp_path / "sys/fs/cgroup/a/memory.events", "oom 3", "oom_kill 2", "oom_group_kill 0")
    assert oom_kills(tmp_path) == 2
    write(tmp_path / "sys/fs/cgroup/a/b/memory.events", "oom 3", "oom_kill 1")
    assert oom_kills(tmp_path) == 1


def test_kills_of_the_older_kind(tmp_path: Path) -> None:
    within(tmp_path, V1_MOUNT, "4:memory:/a", "0::/")
    events = tmp_path / "sys/fs/cgroup/memory/a/memory.oom_control"
    write(events, "oom_kill_disable 0", "under_oom 0", "oom_kill 4")
    assert oom_kills(tmp_path) == 4


FILES = ("proc/meminfo", "proc/vmstat", "proc/self/cgroup", "proc/self/mountinfo")


@few
@given(
    texts=st.tuples(*[st.sampled_from([None, V2_MOUNT, V1_MOUNT, "0::/a", "4:memory:/a"])] * 4),
    cut=st.text("0 :/-\n\0x\u0661", max_size=9),
)
def test_what_makes_no_sense_is_not_known(texts: Sequence[str | None], cut: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        for file, text in zip(FILES, texts, strict=True):
            if text is not None:
                write(Path(name, file), text[len(cut) :] + cut, cut + text, text)
        for file in ("memory.max", "memory.current", "memory.stat", "memory.events"):
            write(Path(name, "sys/fs/cgroup", file), cut)
        assert left(Path(name)) is None
        assert oom_kills(Path(name)) is None


# When it is short


def readings(*sizes_mb: int | None) -> Callable[[], Left | None]:
    """One after the other, and then an error."""
    each = iter(sizes_mb)

    def read() -> Left | None:
        size = next(each)
        return None if size is None else Left(size * MB, "here")

    return read


def test_short_is_below_the_bound_twice_in_a_row() -> None:
    watch = Watch(256, read=readings(255, 256, 255, 254, 300))
    assert [watch.short(second) for second in (0.0, 1.0, 2.0)] == [None, None, None]
    assert watch.short(3.0) == (
        "254 MB of memory are left here, less than runtime.min_free_memory_mb: `256`"
    )
    assert watch.short(4.0) is None


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, 8.0]), st.sampled_from([None, 9, 10])))
)
def test_short_needs_two_looks_a_second_apart(moments: list[tuple[float, int | None]]) -> None:
    now, size, looks = 0.0, 0, list[tuple[float, int | None]]()

    def read() -> Left | None:
        looks.append((now, size))
        return None if size is None else Left(size * MB, "here")

    watch = Watch(10, read=read)
    for wait_s, size in moments:  # noqa: B007, the function reads it
        now += wait_s
        before = len(looks)
        short = watch.short(now)
        looked = len(looks) > before
        assert (short is not None) == (looked and [s for _, s in looks[-2:]] == [9, 9])
    times = [at for at, _ in looks]
    assert all(later - sooner >= 1.0 for sooner, later in pairwise(times))


def test_nothing_is_watched_with_a_bound_of_0() -> None:
    watch = Watch(0, read=readings(), kills=lambda: 0)
    watch.check()
    assert [watch.short(second) for second in (0.0, 1.0, 2.0)] == [None] * 3
    assert watch.blame() is None


def test_a_start_is_refused_with_the_values_and_the_fix() -> None:
    Watch(256, read=readings(256)).check()
    Watch(256, read=readings(None)).check()
    with pytest.raises(UserError) as refusal:
        Watch(256, read=readings(255)).check(Path("runs/a/config.toml"))
    assert str(refusal.value) == (
        "255 MB of memory are left here, less than runtime.min_free_memory_mb: `256`. "
        "Free some, or lower it in `runs/a/config.toml` (0: not watched)."
    )


def test_each_kill_that_the_kernel_counts_explains_one_death() -> None:
    count = 3
    watch = Watch(256, read=readings(300, 100), kills=lambda: count)
    assert watch.blame() is None  # those were before
    count = 5
    assert [watch.blame() for _ in range(3)] == ["killed by the kernel: out of memory"] * 2 + [None]
    assert watch.deaths == 2
    watch.short(0.0)
    assert watch.blame() is None
    watch.short(1.0)
    assert watch.blame() == "perhaps for want of memory: 100 MB of memory are left here"
    assert watch.deaths == 2


@pytest.mark.parametrize("looks", range(4))
def test_a_kill_explains_a_death_of_the_next_two_looks_alone(looks: int) -> None:
    """Others are killed as well, and nobody asks why."""
    count = 3
    watch = Watch(0, kills=lambda: count)
    watch.short(0.0)
    count = 5
    for second in range(looks):
        watch.short(1.0 + second)
        watch.short(1.5 + second)  # no look: it is too soon
    assert (watch.blame() is not None) == (looks < 2)
    count = 6
    assert watch.blame() == "killed by the kernel: out of memory"


@pytest.mark.parametrize("value", [-1, "much", 0.5])
def test_the_setting_is_checked(value: Any) -> None:
    with pytest.raises(UserError, match=r"runtime\.min_free_memory_mb.*`" + str(value)):
        read_config({"model": {"path": "m"}, "runtime": {"min_free_memory_mb": value}})


# A part that was killed


@pytest.fixture
def part(tmp_path: Path) -> Iterator[WorkerProcess]:
    setup = ms.Setup(role="rollout", config={}, threads=1)
    site = Site("m", str(tmp_path), os.getpid())
    process = WorkerProcess("the part", setup, site, tmp_path / "log")
    yield process
    process.end()


def test_a_death_by_a_foreign_hand_says_whose(part: WorkerProcess) -> None:
    os.kill(part.pid, signal.SIGKILL)
    assert part.death(lambda: "by a bear") == "the part ended with signal SIGKILL, by a bear"
    assert part.death(lambda: None) == "the part ended with signal SIGKILL"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_is_blamed_for_other_deaths(how: signal.Signals, part: WorkerProcess) -> None:
    if how is signal.SIGKILL:
        part.kill()
    else:
        os.kill(part.pid, how)
    assert part.death(lambda: "by a bear") == f"the part ended with signal {how.name}"


# Runs


@pytest.mark.slow
def test_a_run_that_gets_short_of_memory_saves_and_goes_on_later(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command line, and resumed as its message says, with fewer instances."""
    out = tmp_path / "run"
    write(tmp_path / "prompts.jsonl", *(json.dumps(row) for row in PROMPTS))
    config = settings(
        model, out, **LOCAL, task={"prompts": str(tmp_path / "prompts.jsonl")}, run={"steps": 8}
    )
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))

    def watch(bound_mb: int) -> Watch:
        def read() -> Left:
            return LITTLE if has_trained(out) else PLENTY

        return Watch(bound_mb, read=read, every_s=0.0)  # a fast machine takes a step in 20 ms

    with monkeypatch.context() as patch:
        patch.setattr(wall_clock, "Watch", watch)
        code = cli.main(["train", str(tmp_path / "config.toml")])
    said = capsys.readouterr().err.strip()
    assert code == 1, said
    assert "100 MB of memory are left on this machine" in said
    assert "less than runtime.min_free_memory_mb: `256`. Free some" in said
    assert "all is saved" in said and f"`{out}/config.toml`" in said
    assert said.endswith(f"Resume with: dora-rl train --resume {out}")

    before = trained(out)
    assert 0 < len(before) < 8 * 4
    resolved = (out / "config.toml").read_text()
    assert "instances = 2" in resolved
    (out / "config.toml").write_text(resolved.replace("instances = 2", "instances = 1"))
    ended = execute(plan_resume(out))
    assert_sound(ended)
    after = trained(out)
    assert after[: len(before)] == before
    assert [step for step, _, _ in after] == [step for step in range(8) for _ in range(4)]


class OutOfMemory(Killer):
    """Kills as the kernel would, and counts."""

    def __init__(self, times: int) -> None:
        super().__init__("rollout-0", again=True)
        self.times = times
        self.kills = 0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        before = self.killed
        if self.kills < self.times:
            super().observed(now, event, commands)
        self.kills += self.killed != before


def killed_run(model: Path, out: Path, times: int, bound_mb: int = 256) -> Ending:
    config = read_config(settings(model, out, **ALONE, run={"steps": 6}))
    kernel = OutOfMemory(times)
    with RunFiles(prepare(config, prompts=PROMPTS), listeners=[kernel]) as files:
        watch = Watch(bound_mb, read=lambda: PLENTY, kills=lambda: kernel.kills)
        try:
            ending = local.LocalRuntime(files, watch).run()
        finally:
            _, audit = files.close(Ending(False, "as it ended"), 1.0)
    assert kernel.kills == times
    assert audit.ok
    return ending


@pytest.mark.faults
def test_a_part_that_the_kernel_kills_twice_ends_the_run(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ending = killed_run(model, out, times=2)
    assert not ending.ok and not ending.interrupted
    assert "SIGKILL, killed by the kernel: out of memory. Free some" in ending.reason
    lost = [r.event.reason for r in records(out) if isinstance(r.event, InstanceFailed)]
    assert (
        lost
        == ["rollout instance 0 ended with signal SIGKILL, killed by the kernel: out of memory"] * 2
    )
    assert_sound(execute(plan_resume(out, prompts=PROMPTS)))


def test_a_part_that_is_killed_even_while_the_run_stops_ends_it_at_once(
    model: Path, tmp_path: Path
) -> None:
    """Another one would be killed as well, and the batch rejected for it."""
    config = read_config(settings(model, tmp_path / "run", **ALONE))
    count = 0
    watch = Watch(256, read=lambda: PLENTY, kills=lambda: count)
    with RunFiles(prepare(config, prompts=PROMPTS)) as files:
        runtime = local.LocalRuntime(files, watch)
        for count in (1, 2, 3):
            why = watch.blame()
            assert why is not None
            if count < 3:
                runtime._killed_short(why)
                continue
            with pytest.raises(RunFailed, match=r"out of memory\. Free some"):
                runtime._killed_short(why)


@pytest.mark.faults
def test_kills_are_only_told_where_memory_is_not_watched(model: Path, tmp_path: Path) -> None:
    ending = killed_run(model, tmp_path / "run", times=2, bound_mb=0)
    assert ending.ok and not ending.interrupted


@pytest.mark.skipif(not memory_watch().in_force, reason="memory is watched on Linux alone")
@pytest.mark.parametrize("command", ["train", "check"])
def test_nothing_is_written_where_memory_is_short_already(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    config = settings(model, out, **LOCAL, task={"prompts": str(tmp_path / "prompts.jsonl")})
    write(tmp_path / "prompts.jsonl", *(json.dumps(row) for row in PROMPTS))
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))
    bound = "runtime.min_free_memory_mb=1000000000"
    assert cli.main([command, str(tmp_path / "config.toml"), "--set", bound]) == 2
    said = capsys.readouterr().err
    assert "min_free_memory_mb: `1000000000`. Free some, or lower it (0: not watched)." in said
    assert not out.exists()
