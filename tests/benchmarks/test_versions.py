"""Several live versions in one batch: order and arithmetic with a fake, then for real."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks import versions
from dora_rl.benchmarks.contestants.publisher import Publisher
from dora_rl.benchmarks.models import open_model
from dora_rl.benchmarks.versions import Plan, measure
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.registry import EngineName
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.fingerprint import probe
from dora_rl.weights.loading import open_version
from tests.benchmarks import stubs

SMALL: dict[str, Any] = {
    "model": "tiny",
    "batch": 4,
    "prompt_tokens": 4,
    "new_tokens": 3,
    "threads": 1,
    "dtype": "float32",
}


class Fake:
    """Takes half a second a token, times the number of versions."""

    def __init__(self, log: list[dict[str, Any]], name: str = "ours") -> None:
        self._log = log
        self.name = name

    def settle(self) -> bool:
        return True

    def ask(self, request: str, **given: Any) -> Any:
        self._log.append(given)
        tokens = len(given["prompts"]) * given["new_tokens"]
        seconds = 0.5 * given["versions"] * given["new_tokens"]
        return {"seconds": seconds, "tokens": tokens, "logprobs": tokens}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def fakes(stack: ExitStack, starts: Any, *rest: Any) -> list[Fake]:
        assert [start.settings["versions"] for start in starts] == [4]
        return [Fake(asked)]

    monkeypatch.setattr(versions, "start_all", fakes)
    return asked


def test_numbers_of_versions_take_turns(log: list[dict[str, Any]]) -> None:
    measure(Plan(**SMALL, versions=(4, 1, 2), repeats=2))
    asked = [(given["versions"], given["new_tokens"]) for given in log]
    warm = [(1, 3), (2, 3), (4, 3)]
    there = [(count, tokens) for count in (1, 2, 4) for tokens in (1, 3)]
    back = [(count, tokens) for count in (4, 2, 1) for tokens in (1, 3)]
    assert asked == warm + there + back
    prompts = [tuple(prompt) for given in log for prompt in given["prompts"]]
    assert len(set(prompts)) == len(prompts) == 4 * len(log)


def test_ratios_by_hand(log: list[dict[str, Any]]) -> None:
    result = measure(Plan(**SMALL, repeats=2))
    report = result.to_json()
    # 4 rows, 2 tokens beyond the first, each 0.5 s a version
    rates = {count: s["decode_tokens_per_s"] for count, s in report["versions"].items()}
    assert rates == {"1": 8.0, "2": 4.0, "4": 2.0}
    assert report["ratios"] == {"2/1": 0.5, "4/1": 0.25}
    assert [line.split()[:4] for line in result.summary()[2:]] == [
        ["1", "4", "8.0", "1.00"],
        ["2", "2", "4.0", "0.50"],
        ["4", "1", "2.0", "0.25"],
    ]


def test_adapters_take_turns_with_the_base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: dict[str, list[dict[str, Any]]] = {}

    def fakes(stack: ExitStack, starts: Any, *rest: Any) -> list[Fake]:
        return [Fake(logs.setdefault(start.name, []), start.name) for start in starts]

    published: list[Any] = []
    monkeypatch.setattr(versions, "start_all", fakes)
    monkeypatch.setattr(versions, "_publish", lambda *given: published.append(given))
    result = measure(Plan(**SMALL, repeats=2, lora=True))
    assert len(published) == 1
    assert [given["versions"] for given in logs["base"]] == [1] * 5
    report = result.to_json()
    assert (report["engine"], report["lora_rank"]) == ("embedded", 16)
    assert list(report["versions"]) == ["1", "2", "4"]
    assert report["no_adapter"]["decode_tokens_per_s"] == 8.0
    assert report["ratios"] == {
        "2/1": 0.5,
        "4/1": 0.25,
        "1/no_adapter": 1.0,
        "2/no_adapter": 0.5,
        "4/no_adapter": 0.25,
    }
    head, *rows = result.summary()[1:]
    assert "to no adapter" in head
    assert rows[2].split()[:5] == ["4", "1", "2.0", "0.25", "0.25"]
    assert rows[3].split()[:5] == ["no", "adapter", "4", "8.0", "1.00"]
    shown = stubs.interrupted_everywhere(partial(measure, Plan(**SMALL, repeats=2, lora=True)))
    assert shown[0].to_json()["no_adapter"] is None  # not yet measured


def test_what_was_measured_can_be_shown_at_any_moment(log: list[dict[str, Any]]) -> None:
    shown = stubs.interrupted_everywhere(partial(measure, Plan(**SMALL, repeats=2)))
    assert [list(result.to_json()["versions"]) for result in shown[:3]] == [
        ["1"],
        ["1", "2"],
        ["1", "2", "4"],
    ]


def test_repeats_that_do_not_fit_are_left_out_and_told_of(
    log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "repeats", lambda count, budget_s: range(count - 1))
    result = measure(Plan(**SMALL, repeats=3, phase_seconds=7))
    assert len(result.samples[4].seconds) == 2
    assert "2 of 3 repeats within --phase-seconds 7." in result.notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": (2, 4)}, "--versions must name 1.*`2,4`"),
        ({"versions": (1, 3)}, "--batch must be a multiple of 3.*`4`"),
        ({"versions": (1, 0)}, "--versions must be >= 1: `0`"),
        ({"batch": 0}, "--batch must be >= 1: `0`"),
        ({"new_tokens": 1}, "--new-tokens must be >= 2: `1`"),
        ({"dtype": "int4"}, "--dtype must be one of"),
        ({"threads": -2}, "--threads must be >= 1: `-2`"),
        ({"engine": EngineName.VLLM}, "--engine vllm holds one full set of weights.*Add --lora"),
        ({"lora_rank": 8}, "--lora-rank is of adapters: `8`. Add --lora"),
        ({"lora": True, "lora_rank": 0}, "--lora-rank must be from 1 to 512: `0`"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan(**{**SMALL, **changes})


def test_a_sequence_must_fit_the_context() -> None:
    with pytest.raises(UserError, match=r"8193 tokens.*`8192`"):
        measure(Plan(**{**SMALL, "prompt_tokens": 8190}))


@pytest.mark.slow
def test_several_versions_for_real() -> None:
    told = stubs.Told()
    result = measure(Plan(**SMALL, versions=(1, 2, 4), repeats=1), told)
    assert list(result.samples) == [1, 2, 4]
    assert all(total > 0 for samples in result.samples.values() for _, total in samples.seconds)
    assert told.lines[0] == "loading ours"
    assert told.lines[-1] == "measuring, repeat 1 of 1: 4 versions"


@pytest.mark.slow
def test_adapters_for_real() -> None:
    told = stubs.Told()
    result = measure(Plan(**SMALL, versions=(1, 2), repeats=1, lora=True, lora_rank=2), told)
    assert list(result.samples) == [1, 2] and result.no_adapter is not None
    assert told.lines[:4] == [
        "loading publisher",
        "publishing adapters",
        "loading adapters",
        "loading base",
    ]
    assert told.lines[-1] == "measuring, repeat 1 of 1: no adapter"


def test_fingerprints_are_of_each_adapter(tmp_path: Path) -> None:
    """By the trainer's code, as vLLM asks for them: other adapters, other fingerprints."""
    directory = str(open_model("tiny", "float32", tmp_path).directory)
    publisher = Publisher(threads=1)
    publisher.publish_model(directory, str(tmp_path / "base"), fingerprints=True)
    publisher.publish_adapters(directory, str(tmp_path / "adapters"), 2, 4, fingerprints=True)
    base = open_version(WeightStore(tmp_path / "base").path(0)).manifest.fingerprint
    store = WeightStore(tmp_path / "adapters")
    manifests = [open_version(store.path(version)).manifest for version in (0, 1)]
    found = [base, *(manifest.fingerprint for manifest in manifests)]
    assert all(manifest.adapter and manifest.adapter.rank == 4 for manifest in manifests)
    assert all(one is not None and one.tokens == probe(512) for one in found)
    assert len({one.logprobs for one in found if one is not None}) == 3
