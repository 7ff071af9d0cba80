"""The timeline: valid JSON, lanes whose spans nest, versions that can be told apart."""

import itertools
import json
from collections import defaultdict
from typing import Any, NamedTuple

import pytest

from dora_rl.core.protocol.commands import Install, Resume, Suspend, Train
from dora_rl.core.protocol.events import GroupJudged, TimerFired, VersionInstalled
from dora_rl.core.protocol.types import BatchGroup
from dora_rl.observe.trace import Trace, TraceFile

Spans = dict[str, list[tuple[float, float, str]]]


class Span(NamedTuple):
    kind: str
    lane: int | None
    start: float
    end: float
    version: int
    detail: str = ""


class Written:
    """A trace file in memory, and ways to look at it."""

    def __init__(self) -> None:
        self.text = ""
        self.file = TraceFile(self._write)

    def _write(self, text: str) -> None:
        self.text += text

    def events(self) -> list[dict[str, Any]]:
        self.file.close()
        events = json.loads(self.text)
        assert isinstance(events, list)
        return events

    def spans(self, pid: int = 1) -> Spans:
        names, spans = {}, defaultdict(list)
        for event in self.events():
            if event["pid"] != pid:
                continue
            if event["ph"] == "M" and event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                start = event["ts"] / 1e6
                end = start + event["dur"] / 1e6
                spans[names[event["tid"]]].append((start, end, event["name"]))
        return dict(spans)


@pytest.fixture
def written() -> Written:
    return Written()


@pytest.fixture
def trace(written: Written) -> Trace:
    return written.file.process("multi_version")


def test_an_empty_trace_is_valid(written: Written) -> None:
    assert written.events() == []


def test_every_event_is_one_that_viewers_know(written: Written, trace: Trace) -> None:
    trace.slots(0.0, 0, 4, 0)
    trace.span(Span("train", None, 1.0, 2.0, 0))
    trace.observe(1.0, GroupJudged(0), [])
    trace.end(3.0)
    for event in written.events():
        assert event["ph"] in "XCM"
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        assert {"pid", "tid", "name", "args"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_an_instance_is_a_lane_of_spans_by_version(written: Written, trace: Trace) -> None:
    trace.slots(0.0, 3, 8, 0)
    trace.slots(10.0, 3, 0, None)
    trace.slots(12.0, 3, 8, 1)
    trace.slots(20.0, 3, 6, 1)
    trace.end(30.0)
    assert written.spans()["instance 3"] == [
        (0.0, 10.0, "v₀ · 8 running"),
        (12.0, 20.0, "v₁ · 8 running"),
        (20.0, 30.0, "v₁ · 6 running"),
    ]


def test_short_changes_are_merged_into_their_mean(written: Written, trace: Trace) -> None:
    trace.slots(0.0, 0, 8, 0)
    for i in range(1, 9):
        trace.slots(i / 10, 0, 8 - i % 2, 0)
    trace.end(0.9)
    assert written.spans()["instance 0"] == [(0.0, 0.9, "v₀ · 8 running")]


def test_versions_differ_where_viewers_look(written: Written, trace: Trace) -> None:
    for version in range(12):
        trace.slots(10.0 * version, 0, 8, version)
    trace.end(120.0)
    spans = [e for e in written.events() if e["ph"] == "X"]
    without_digits = {"".join(c for c in e["name"] if c not in "0123456789") for e in spans}
    assert len(without_digits) == 12  # Perfetto hashes the name without its ASCII digits
    assert all(a["cname"] != b["cname"] for a, b in itertools.pairwise(spans))
    assert [e["args"]["version"] for e in spans] == list(range(12))


def test_spans_that_overlap_get_lanes_of_their_own(written: Written, trace: Trace) -> None:
    trace.span(Span("install", 0, 0.0, 4.0, 1))
    trace.span(Span("migrate", 0, 5.0, 7.0, 1, "from 2"))
    trace.span(Span("migrate", 0, 6.0, 8.0, 1, "from 3"))
    trace.span(Span("park", 0, 8.0, 9.0, 1))
    assert written.spans() == {
        "instance 0 · moves": [
            (0.0, 4.0, "install v₁"),
            (5.0, 7.0, "migrate v₁"),
            (8.0, 9.0, "park v₁"),
        ],
        "instance 0 · moves 2": [(6.0, 8.0, "migrate v₁")],
    }


def test_the_trainer_and_the_pause_of_rollout_have_lanes(written: Written, trace: Trace) -> None:
    trace.span(Span("train", None, 1.0, 2.0, 0))
    trace.span(Span("publish", None, 2.0, 3.0, 1))
    trace.span(Span("suspend", None, 1.0, 2.5, 0))
    assert written.spans() == {
        "trainer": [(1.0, 2.0, "train v₀"), (2.0, 3.0, "publish v₁")],
        "rollout suspended": [(1.0, 2.5, "suspend")],
    }


def test_work_that_waits_for_training_is_not_drawn(written: Written, trace: Trace) -> None:
    trace.slots(0.0, 0, 8, 0)
    trace.observe(10.0, TimerFired(), [Suspend()])
    trace.observe(20.0, TimerFired(), [Resume()])
    trace.end(30.0)
    assert [(start, end) for start, end, _ in written.spans()["instance 0"]] == [
        (0.0, 10.0),
        (20.0, 30.0),
    ]


def test_weights_that_change_under_running_work_show(written: Written, trace: Trace) -> None:
    trace.slots(0.0, 0, 8, 0)
    trace.observe(5.0, TimerFired(), [Install(0, 1, 1, 0, carry=True)])
    trace.observe(6.0, VersionInstalled(0, 1, 1, "v1"), [])
    trace.end(10.0)
    assert [name for _, _, name in written.spans()["instance 0"]] == [
        "v₀ · 8 running",
        "v₁ · 8 running",
    ]


def test_counters_follow_groups_and_batches(written: Written, trace: Trace) -> None:
    for group in range(3):
        trace.observe(10.0 * group, GroupJudged(group), [])
    trace.observe(21.0, GroupJudged(9, "no_signal"), [])
    train = Train(2, (BatchGroup(0, 1, (0, 1)), BatchGroup(1, 2, (2, 3))))
    trace.observe(30.0, TimerFired(), [train])
    trace.observe(31.0, TimerFired(), [train])  # repeated by the core
    trace.slots(40.0, 0, 4, 2)
    counters = defaultdict(list)
    for event in written.events():
        if event["ph"] == "C":
            counters[event["name"]].append((event["ts"] / 1e6, event["args"][event["name"]]))
    assert counters == {
        "ready groups": [(0.0, 1), (10.0, 2), (20.0, 3), (30.0, 1)],
        "staleness": [(30.0, 0.5)],
        "running": [(40.0, 4)],
    }


def test_each_process_is_a_run(written: Written) -> None:
    for name in ("sync", "multi_version"):
        trace = written.file.process(name)
        trace.slots(0.0, 0, 1, 0)
        trace.end(1.0)
    names = [e["args"]["name"] for e in written.events() if e["name"] == "process_name"]
    assert names == ["sync", "multi_version"]
    assert written.spans(1) == written.spans(2)
