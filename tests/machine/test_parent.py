"""A process that ends with its parent, by the kernel or by looking."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dora_rl.machine.fast_paths import PORTABLE
from tests.patience import PATIENCE_S

CHILD = """
import os, sys
from dora_rl.machine.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
while True: pass
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
time.sleep(600)
"""


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("portable", ["0", "1"])
def test_a_busy_child_of_a_killed_parent_ends(portable: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, PORTABLE: portable},
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running() and child.ppid() == parent.pid
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + PATIENCE_S
        while alive(child):
            assert time.monotonic() < deadline, "the child outlives its parent"
            time.sleep(0.02)


@pytest.mark.parametrize("portable", ["0", "1"])
def test_a_child_whose_parent_is_gone_already_ends_at_once(portable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "1"],  # it is not that one's child
        env={**os.environ, PORTABLE: portable},
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1 and done.stdout == b""
