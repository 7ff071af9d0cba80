"""What containers leave to a process: read from trees of files, and from a real cgroup."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.machine import cgroups
from dora_rl.machine.cgroups import cpu_quota, memory_limit
from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.models.linear import Layout
from tests.runtime.test_memory import V1_MOUNT, V2_MOUNT, write

CPU_V1 = "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)


def v2(root: Path, path: str = "/box/worker") -> Path:
    write(root / "proc/self/cgroup", f"0::{path}")
    write(root / "proc/self/mountinfo", V2_MOUNT)
    return root / "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("own", "parent", "quota"),
    [
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
        ("max 100000", "50000 100000", 0.5),  # an ancestor's holds as well
        ("400000 100000", "200000 100000", 2.0),
        ("400000 100000", "", 4.0),  # a file that is not there tells nothing
        ("junk", "200000", None),
    ],
)
def test_the_tightest_quota_of_v2_counts(
    tmp_path: Path, own: str, parent: str, quota: float | None
) -> None:
    top = v2(tmp_path)
    write(top / "box/worker/cpu.max", own)
    if parent:
        write(top / "box/cpu.max", parent)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("us", "quota"), [("-1", None), ("50000", 0.5), ("300000", 3.0)])
def test_a_quota_of_v1_counts(tmp_path: Path, us: str, quota: float | None) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/box", "4:memory:/other")
    write(tmp_path / "proc/self/mountinfo", CPU_V1, V1_MOUNT)
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", us)
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000")
    assert cpu_quota(tmp_path) == quota


def test_no_cgroups_are_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None


def test_the_largest_number_of_v1_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/box")
    write(tmp_path / "proc/self/mountinfo", V1_MOUNT)
    limit = tmp_path / "sys/fs/cgroup/memory/box/memory.limit_in_bytes"
    write(limit, str(0x7FFFFFFFFFFFF000))
    assert memory_limit(tmp_path) is None
    write(limit, "123")
    assert memory_limit(tmp_path) == 123


def test_the_switch_hides_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(v2(tmp_path) / "box/worker/memory.max", "123")
    assert memory_limit(tmp_path) == 123
    monkeypatch.setenv(PORTABLE, "1")
    assert memory_limit(tmp_path) is None


def test_weights_are_laid_out_for_the_memory_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = v2(tmp_path) / "box/worker/memory.max"
    monkeypatch.setattr(cgroups, "memory_limit", lambda: memory_limit(tmp_path))
    engine, weights = EngineSettings(version_slots=1), 1 << 20
    write(limit, "max")
    assert engine.layout_for(weights, 1) in (Layout.PACKED, Layout.NATIVE)
    write(limit, str(3 << 20))
    assert engine.layout_for(weights, 1) is Layout.MAPPED


# A real one


QUOTA = {
    cgroups.V2: ("cpu.max", "50000 100000"),
    cgroups.V1: ("cpu.cfs_quota_us", "50000"),
}


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A cgroup with the time of half a core; gone afterwards."""
    why = "the system has no cgroups"
    for found in cgroups.groups("cpu"):  # a hierarchy may lack the controller
        group = found.directory / f"dora-rl-test-{os.getpid()}"
        file, quota = QUOTA[found.file_system]
        try:
            group.mkdir()
            (group / file).write_text(quota)
        except OSError as error:
            why = f"{group}: {error.strerror}"
        else:
            yield group
            return
        finally:
            with contextlib.suppress(FileNotFoundError):
                group.rmdir()
    pytest.skip(f"no quota can be set here: {why}")


def test_a_process_with_half_a_core_counts_one(half_a_core: Path) -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
        "from dora_rl.machine import fast_paths, processor;"
        "print(processor.cores(), fast_paths.tried()['cgroup-limits'].finding)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(half_a_core / "cgroup.procs")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    cores, _, finding = said.partition(" ")
    assert cores == "1"
    assert finding.startswith("the time of 0.5 cores")
