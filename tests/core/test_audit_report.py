"""The audit's report: counts, statistics, words."""

import json

from dora_rl.core.audit import LengthBias, Spread
from dora_rl.core.audit.report import ks_statistic
from dora_rl.core.protocol import commands as c
from tests.core.story import opened

# Reports


def test_examples_are_few_and_counts_are_whole() -> None:
    story = opened()
    for version in range(10, 20):
        story.ask(c.Delete(version))
    (check,) = [check for check in story.report.checks if check.breaches]
    assert (check.breaches, len(check.examples)) == (10, 5)
    assert check.examples[0] == "event 4 at 4 s: Delete of version 10: never published"
    assert "    ... and 5 more" in story.report.summary()


def test_the_report_as_json() -> None:
    story = opened()
    story.ask(c.Delete(9))
    data = json.loads(json.dumps(story.report.to_json()))
    assert (data["ok"], data["verdict"], data["paradigm"]) == (False, "broken", "multi_version")
    (broken,) = [check for check in data["checks"] if check["breaches"]]
    assert (broken["promise"], broken["verdict"]) == ("leases", "BROKEN")
    assert data["staleness"] == {"mean": 0.0, "p95": 0.0, "max": 0.0}


def test_sparse_group_ids_cost_no_memory() -> None:
    story = opened()
    story.ready(10**15)
    story.train(0, 10**15)
    story.trained(0)
    assert (story.report.ok, story.report.trained) == (True, 2)


def test_ks_statistic() -> None:
    assert ks_statistic({1: 1, 2: 1}, {1: 1, 2: 1}) == 0.0
    assert ks_statistic({1: 2}, {2: 3}) == 1.0
    assert ks_statistic({1: 1, 2: 1, 3: 2}, {1: 1, 3: 1}) == 0.25
    assert ks_statistic({}, {1: 1}) == 0.0


def test_spread() -> None:
    assert Spread.of({}) == Spread(0.0, 0.0, 0.0)
    assert Spread.of({1: 95, 100: 5}) == Spread(5.95, 1, 100)
    assert Spread.of({1: 94, 100: 6}).p95 == 100


def test_a_length_bias_is_noted_but_breaks_nothing() -> None:
    short, all_of_them = {10: 500}, {10: 500, 1000: 500}
    assert LengthBias.of(all_of_them, short).warning
    assert not LengthBias.of(all_of_them, {10: 260, 1000: 240}).warning
    assert not LengthBias.of({10: 1, 1000: 1}, {10: 1}).warning  # too few to say
    story = opened(max_staleness=60)
    for group in range(40):
        story.ready(group)
    for step in range(2):
        story.train(step, step)
        story.trained(step)
    report = story.report
    assert report.lengths.ks > 0.9
    assert report.lengths.warning
    assert any(note.startswith("length bias: ") for note in report.notes)
    assert all(check.ok for check in report.checks)
