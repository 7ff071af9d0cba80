"""Memory that is really gone, in a cgroup of the kernel's: the run ends, and can be resumed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dora_rl.machine import cgroups
from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.runtime.control.memory import MB
from tests.patience import PATIENCE_S
from tests.runtime.test_local import wait_for

pytestmark = pytest.mark.faults

LIMIT = {cgroups.V2: "memory.max", cgroups.V1: "memory.limit_in_bytes"}
USAGE = {cgroups.V2: "memory.current", cgroups.V1: "memory.usage_in_bytes"}
MAPPED = {cgroups.V2: "file_mapped", cgroups.V1: "mapped_file"}
STEPS = 1000  # more than it ever trains: how fast the machine is does not matter
RUN = (
    *("--plain", "--steps", str(STEPS), "--set", "orchestration.groups_per_step=4"),
    *("--set", "task.eval_size=4", "--set", "run.checkpoint_every=1000"),
)


class Box:
    """A cgroup, first without a limit."""

    def __init__(self, group: cgroups.Group, directory: Path) -> None:
        self.directory = directory
        self._limit = directory / LIMIT[group.file_system]
        self._usage = directory / USAGE[group.file_system]
        self._mapped = MAPPED[group.file_system]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`dora-rl` in the box."""
        enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
        code = f"{enter} from dora_rl.cli import main; sys.exit(main(sys.argv[2:]))"
        environment = {name: value for name, value in os.environ.items() if name != PORTABLE}
        return subprocess.Popen(
            [sys.executable, "-c", code, str(self.directory / "cgroup.procs"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def leave(self, size: int) -> None:
        """Take all memory but for so much; what the kernel can drop, it drops for that."""
        for attempt in range(100):  # usage grows while the kernel looks for what to drop
            try:
                self._limit.write_text(str(int(self._usage.read_text()) - self._cache() + size))
            except OSError as error:
                if error.errno != errno.EBUSY or attempt == 99:
                    raise
            else:
                return

    def _cache(self) -> int:
        stat = cgroups.table(self.directory / "memory.stat")
        return stat["inactive_file"] + max(0, stat["active_file"] - stat[self._mapped])

    def empty(self) -> None:
        for _ in range(200):
            for pid in cgroups.lines(self.directory / "cgroup.procs"):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                self.directory.rmdir()
                return
            time.sleep(0.05)


@pytest.fixture
def box() -> Iterator[Box]:
    why = "the system has no cgroups"
    for group in cgroups.groups("memory"):  # a hierarchy may lack the controller
        directory = group.directory / f"dora-rl-test-{os.getpid()}"
        try:
            directory.mkdir()
            box = Box(group, directory)
            box.leave(1 << 40)
        except (OSError, KeyError) as error:
            why = f"{directory}: {error}"
            with suppress(OSError):
                directory.rmdir()
            continue
        try:
            yield box
        finally:
            box.empty()
        return
    pytest.skip(f"no limit can be set here: {why}")


def steps_of(out: Path) -> list[int]:
    with suppress(FileNotFoundError):
        lines = (out / "metrics.jsonl").read_text().splitlines()
        records = (json.loads(line) for line in lines if line.endswith("}"))
        return [record["step"] for record in records if record["kind"] == "step"]
    return []


@pytest.mark.parametrize("left_mb", [128, 7])
def test_a_run_whose_memory_is_taken_ends_by_itself_and_is_resumed(
    left_mb: int, box: Box, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = box.start("train", *RUN, "--out", str(out))
    wait_for(lambda: len(steps_of(out)) >= 3, process)
    box.leave(left_mb * MB)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    assert "MB of memory are left in the cgroup" in said or "out of memory" in said, said
    before = steps_of(out)
    assert 3 <= len(before) < STEPS

    command = [sys.executable, "-m", "dora_rl"]
    resumed = subprocess.Popen(
        [*command, "train", "--resume", str(out), "--plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: len(steps_of(out)) > len(before), resumed)
        resumed.send_signal(signal.SIGINT)
        said, _ = resumed.communicate(timeout=PATIENCE_S)
    finally:
        resumed.kill()
    assert resumed.returncode == 130, said
    after = steps_of(out)
    assert after == list(range(1, len(after) + 1)) and after[: len(before)] == before
    subprocess.run([*command, "audit", str(out)], check=True)
