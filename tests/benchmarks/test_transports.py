"""The bench of the transports: real processes, every way once, and what is refused."""

import json
import subprocess
import sys

import pytest

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.transports import TRANSPORTS, Case, Plan, Result, measure
from dora_rl.core.protocol.errors import UserError


def case(transport: str, seconds: float, sent: int) -> Case:
    return Case(transport, 10, 2, [1.0, 2.0], [seconds, seconds], [sent, sent], 100)


@pytest.mark.slow
def test_every_transport_is_measured() -> None:
    """In a process of its own: Ray listens at loopback alone where nobody imported it before."""
    sizes = ["--parameters", "1", "--receivers", "2", "--versions", "3"]
    command = [sys.executable, "-m", "dora_rl", "bench", "transports", "--json", *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert [found["transport"] for found in cases] == list(TRANSPORTS)
    for found in cases:
        assert found["versions"] == 3
        assert found["whole_bytes"] > 2_000_000
        share = found["sent_bytes"] / found["whole_bytes"]
        assert share < 0.1 if "delta" in found["transport"] else share == 1.0


def test_it_is_shown_as_a_table_and_as_json() -> None:
    result = Result(Plan(), (case("directory", 0.5, 100), case("process_group+delta", 1.5, 2)))
    head, first, second = result.summary()
    assert head.split()[:3] == ["transport", "parameters", "receivers"]
    assert first.split() == ["directory", "10", "M", "2", "1.50", "s", "0.50", "s", "0.0"]
    assert second.startswith("process_group+delta")
    rows = result.to_json()["cases"]
    assert rows[1]["seconds"] == 3.0 and rows[1]["sent_bytes"] == 2
    assert rows[0]["parameters"] == 10_000_000


def test_what_cannot_be_measured_is_refused() -> None:
    for wrong, said in (
        ({"transports": ("rdma",)}, "--transports must be of directory, .*: `rdma`"),
        ({"parameters": (0,)}, "--parameters must be from 1 to 2000: `0`"),
        ({"parameters": ()}, "--parameters must be from 1 to 2000: `0`"),
        ({"receivers": (99,)}, "--receivers must be from 1 to 16: `99`"),
        ({"changed": 1.5}, "--changed must be above 0, and 1 at most: `1.5`"),
        ({"versions": 0}, "--versions must be >= 1: `0`"),
        ({"case_seconds": 0.0}, "--case-seconds must be > 0: `0`"),
    ):
        with pytest.raises(UserError, match=said):
            Plan(**wrong)  # type: ignore[arg-type]


def test_a_disk_that_is_too_small_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(parameters=(500,), receivers=(4,))
    assert plan.disk_bytes == 11_000_000_000
    monkeypatch.setattr(Plan, "disk_bytes", 1 << 60)
    with pytest.raises(UserError, match=r"GB free, and .* GB are needed. Measure fewer"):
        measure(plan, Reporter())


def test_a_case_that_takes_too_long_has_fewer_versions_but_one() -> None:
    told: list[str] = []
    plan = Plan(
        transports=("directory",), parameters=(1,), receivers=(1,), versions=9, case_seconds=1e-9
    )
    (found,) = measure(plan, Reporter(lambda line, begins: told.append(line))).cases
    assert len(found.receive_s) == 1
    assert any("8 versions are left out" in line for line in told)
