"""`dora-rl bench orchestrator`: what it shows, and what it refuses."""

import json

import pytest

from dora_rl import cli
from dora_rl.benchmarks.orchestrator import DEFAULT_EVENTS, DEFAULT_INSTANCES, GOAL, measure
from dora_rl.benchmarks.world import GROUP_SIZE, SLOTS, World, settings_for
from dora_rl.core.invariants import check

TINY = ["bench", "orchestrator", "--instances", "16,4", "--events", "500"]


def test_the_table_names_every_size_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(TINY) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert "events/s" in head and "p99" in head
    assert [row.split()[0] for row in rows] == ["4", "16"]
    assert "times as much on 16 instances as on 4" in last


def test_one_size_has_no_ratio_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "orchestrator", "--instances", "4", "--events", "100"]) == 0
    assert "times as much" not in capsys.readouterr().out


def test_json_holds_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["goal"] == GOAL
    assert report["within_goal"] == (report["cost_ratio"] <= GOAL)
    small, large = report["sizes"]
    assert (small["instances"], large["instances"]) == (4, 16)
    assert report["cost_ratio"] == large["mean_us"] / small["mean_us"]
    for size in report["sizes"]:
        assert size["events"] >= 500
        assert size["steps"] >= 1
        assert size["versions"] >= 1
        assert 0 < size["p50_us"] <= size["p99_us"] <= size["max_us"]
        assert size["events_per_s"] == pytest.approx(1e6 / size["mean_us"])
        rebalances = size["rebalances"]
        assert rebalances["count"] >= size["steps"]
        assert 0 < rebalances["mean_ms"] <= rebalances["max_ms"]
        assert sum(kind["share"] for kind in size["kinds"].values()) == pytest.approx(1)
        assert sum(kind["count"] for kind in size["kinds"].values()) == size["events"]
        assert {"TrajectoryFinished", "InstanceProgressed", "BatchTrained"} <= size["kinds"].keys()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--instances", "64,many"], "64,many"),
        (["--instances", "0"], "must be >= 2: `0`"),
        (["--instances", "-64"], "must be >= 2: `-64`"),
        (["--instances", "8,8"], "twice"),
        (["--instances", ""], "no sizes"),
        (["--events", "0"], "--events"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "orchestrator", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_defaults_of_the_command_are_those_of_the_measurement() -> None:
    from dora_rl.cli.bench import orchestrator

    defaults = {option.name: option.default for option in orchestrator.params}
    assert defaults["instances"] == ",".join(map(str, DEFAULT_INSTANCES))
    assert defaults["events"] == DEFAULT_EVENTS


def test_the_world_keeps_every_promise_and_scales_with_its_instances() -> None:
    worlds = [World(4), World(16)]
    for world in worlds:
        settings = settings_for(world.instances)
        assert settings.groups_per_step * GROUP_SIZE == world.instances * SLOTS
        for number in range(3000):
            world.obey(world.core.handle(world.now, world.next_event()))
            if number % 100 == 0:
                check(world.core.state)
        assert world.published >= 2
        assert not [name for name in world.core.state.counters if name.startswith("absorbed")]


def test_progress_is_told() -> None:
    told: list[str] = []
    measure([4, 8], 100, told.append)
    assert told[:2] == ["warming up 4 instances", "warming up 8 instances"]
    assert all(line.startswith("measuring") for line in told[2:])
