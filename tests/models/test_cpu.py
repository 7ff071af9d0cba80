"""The guard against a broken AMX: on this machine as it is, and on machines that are acted."""

import json
import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

import pytest

from dora_rl.machine import processor
from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.models import cpu

OURS = (cpu.MARKER, cpu.LIMIT, cpu.LIMIT_BEFORE, PORTABLE)
MATMUL = """
import torch
x, w = (torch.ones(rows, 576, dtype=torch.bfloat16) for rows in (32, 960))
assert bool((torch.nn.functional.linear(x, w) == 576).all())
"""
GUARDED = f"""
import json, os, sys
from dora_rl.machine import processor
from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.models import cpu
said = cpu.guard()
assert "torch" not in sys.modules
{MATMUL}
again = cpu.guard()
print(json.dumps([said, again, os.environ.get(cpu.MARKER), os.environ.get(cpu.LIMIT)]))
"""
# A program in the place of Python that ends as a trial on some machine would.
PROGRAM = "#!/bin/sh\nulimit -c 0\n{}\n"
AMX = "processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile avx512f\n"


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """As a user's first process: nothing is known of AMX, and nothing limits oneDNN."""
    env = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_with_the_guard_a_matmul_survives_and_only_a_machine_that_needs_it_is_limited() -> None:
    done = run_fresh(GUARDED)
    assert done.returncode == 0, done.stderr
    said, again, marker, limit = json.loads(done.stdout)
    assert again is None
    survives_alone = run_fresh(MATMUL).returncode == 0
    assert limit == (None if survives_alone else cpu.WITHOUT_AMX)
    assert (said is None) == survives_alone
    assert marker == ("broken" if not survives_alone else "works" if cpu._advertised() else None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MutableMapping[str, str]:
    """The environment of a machine that advertises AMX; Python does not start there yet."""
    for name in OURS:
        monkeypatch.setenv(name, "")  # so that what the guard sets is taken back as well
        monkeypatch.delenv(name)
    (tmp_path / "cpuinfo").write_text(AMX)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    return os.environ


def trial_ends(how: str) -> None:
    Path(sys.executable).write_text(PROGRAM.format(how))
    Path(sys.executable).chmod(0o755)


@pytest.mark.parametrize(
    ("how", "marker", "words"),
    [
        ("exit 0", "works", None),
        ("kill -ILL $$", "broken", "died of SIGILL"),
        ("kill -SEGV $$", "broken", "died of SIGSEGV"),
        ("exit 1", "broken", "a bf16 matmul failed"),
        ("kill -KILL $$", "unknown", "died of SIGKILL"),
        ("kill -TERM $$", "unknown", "died of SIGTERM"),
        ("exit 3", "unknown", "cannot import torch"),
    ],
)
def test_only_a_fault_of_the_machine_limits_onednn(
    how: str, marker: str, words: str | None, machine: MutableMapping[str, str]
) -> None:
    trial_ends(how)
    said = cpu.guard()
    assert machine[cpu.MARKER] == marker
    assert machine.get(cpu.LIMIT) == (cpu.WITHOUT_AMX if marker == "broken" else None)
    if words is None:
        assert said is None
    else:
        assert said is not None and words in said and cpu.LIMIT in said and "\n" not in said


def test_a_trial_that_hangs_is_ended(
    machine: MutableMapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_ends("exec sleep 60")
    monkeypatch.setattr(cpu, "_TIMEOUT_S", 0.2)
    said = cpu.guard()
    assert said is not None and "more than 0.2 s" in said
    assert machine[cpu.MARKER] == "unknown"


def test_a_trial_that_cannot_start_is_no_verdict(machine: MutableMapping[str, str]) -> None:
    said = cpu.guard()
    assert said is not None and "No such file" in said
    assert machine[cpu.MARKER] == "unknown"
    assert cpu.LIMIT not in machine


@pytest.mark.parametrize("marker", ["works", "broken", "unknown"])
def test_a_child_believes_its_parent(marker: str, machine: MutableMapping[str, str]) -> None:
    machine[cpu.MARKER] = marker  # a trial would fail to start, and say unknown
    said = cpu.guard()
    assert machine[cpu.MARKER] == marker
    assert machine.get(cpu.LIMIT) == (cpu.WITHOUT_AMX if marker == "broken" else None)
    assert (said is None) == (marker != "broken")


@pytest.mark.parametrize("name", [cpu.LIMIT, cpu.LIMIT_BEFORE])
def test_the_user_has_the_last_word(name: str, machine: MutableMapping[str, str]) -> None:
    trial_ends("kill -ILL $$")
    machine[name] = "AVX2"
    before = dict(machine)
    assert cpu.guard() is None
    assert machine == before


@pytest.mark.parametrize("info", ["flags\t: fpu avx512f\n", "model name\t: amx_tile\n", "", None])
def test_a_machine_without_amx_is_left_alone(
    info: str | None, machine: MutableMapping[str, str]
) -> None:
    trial_ends("kill -ILL $$")
    if info is None:
        processor._CPUINFO.unlink()
    else:
        processor._CPUINFO.write_text(info)
    assert cpu.guard() is None
    assert not set(OURS) & machine.keys()


def test_the_portable_way_leaves_onednn_what_every_laptop_has(
    machine: MutableMapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_ends("exit 0")
    monkeypatch.setenv(PORTABLE, "1")
    assert cpu.guard() is None
    assert machine[cpu.LIMIT] == cpu.PLAIN and cpu.MARKER not in machine
    assert not cpu.amx().in_force


def test_a_limit_of_the_users_stays_in_the_portable_way(
    machine: MutableMapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    monkeypatch.setenv(cpu.LIMIT, "SSE41")
    assert cpu.guard() is None
    assert machine[cpu.LIMIT] == "SSE41"
