"""Speculation on against off: order and arithmetic with a fake, then for real."""

from contextlib import ExitStack
from typing import Any

import pytest

from dora_rl.benchmarks import speculation
from dora_rl.benchmarks.speculation import Plan, measure
from dora_rl.core.protocol.errors import UserError

SMALL: dict[str, Any] = {
    "model": "quickstart",
    "batches": (1, 2),
    "prompts": 2,
    "group_size": 2,
    "max_tokens": 24,
    "threads": 1,
    "dtype": "float32",
}


class Fake:
    """Half the seconds with speculation; one of two responses differs where it is `broken`."""

    name = "siblings"

    def __init__(self, broken: bool) -> None:
        self.asked: list[tuple[int, str]] = []
        self._broken = broken

    def ask(self, request: str, **given: Any) -> dict[str, Any]:
        on = given["speculation"] == "on"
        self.asked.append((given["slots"], given["speculation"]))
        written = [[1, 2, 3, 4], [5, 6, 7, 8 + (on and self._broken)]]
        return {
            "seconds": 1.0 if on else 2.0,
            "steps": 4 if on else 8,
            "written": written,
            "proposed": 6 if on else 0,
            "accepted": 4 if on else 0,
        }


@pytest.mark.parametrize("broken", [False, True])
def test_both_ways_take_turns(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(broken)

    def fakes(stack: ExitStack, starts: Any, *rest: Any) -> list[Fake]:
        return [fake]

    monkeypatch.setattr(speculation, "start_all", fakes)
    result = measure(Plan(**SMALL, repeats=2))
    of_one = [way for slots, way in fake.asked if slots == 1]
    assert of_one == ["off", "on", *["off", "on", "on", "off"], *["on", "off", "off", "on"]]
    assert result.differing == (4 if broken else 0)
    report = result.to_json()
    assert report["batches"]["1"]["on/off"] == 2.0
    assert report["batches"]["1"]["off"]["tokens"] == 16
    assert report["batches"]["2"]["on"]["accepted"] == 8
    assert any("2.00" in line for line in result.summary())


def test_for_real_the_same_is_written() -> None:
    result = measure(Plan(**SMALL, repeats=1))
    assert result.differing == 0
    for ways in result.to_json()["batches"].values():
        assert ways["on"]["tokens"] == ways["off"]["tokens"] > 0
        assert ways["off"]["proposed"] == 0


@pytest.mark.parametrize("name", ["prompts", "group_size", "max_tokens", "repeats"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be >= 1: `0`"):
        Plan(**{**SMALL, name: 0})
