"""A mistake is told before a file is written, from Python too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dora_rl
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.base import Request, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.engines.errors import RequestRefused
from dora_rl.models.config import read_config as read_model
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control.memory import left
from dora_rl.runtime.prepare import memory_estimate
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.prepare.preflight import preflight
from dora_rl.runtime.workers.engines import why_too_long
from dora_rl.tasks.environments import Step
from tests.runtime.harness import PROMPTS, REWARDS, settings
from tests.runtime.test_memory import V2_MOUNT, Group, machine, within, write_v2


class Mute:
    """No environment: it has no `step`."""

    def reset(self, example: dict[str, Any]) -> None:
        """Nothing."""


class Room:
    """Says what there is to do itself: the prompt of its row is never asked."""

    def reset(self, example: dict[str, Any]) -> str:
        return "the quick fox"

    def step(self, text: str) -> Step:
        return Step("", reward=1.0, done=True)


def no_number(response: str) -> None:
    """A reward that forgets to return."""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"environment": object()}, "task.environment must be a class"),
        ({"environment": lambda: object()}, "reset raised AttributeError"),
        ({"environment": Mute}, "task.environment has no `step`"),
        ({"reward": no_number}, "reward `no_number` returned no number: `None`"),
        ({"reward": 3}, "task.reward must be"),
    ],
)
def test_objects_that_are_none(
    what: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match=message):
        dora_rl.train(model, PROMPTS, **{"reward": "tags", **what}, out=out, steps=1)
    assert not out.exists()


def plan_of(model: Path, tmp_path: Path, prompts: Any = PROMPTS, **sections: Any) -> Any:
    config = read_config(settings(model, tmp_path / "run", **sections))
    return prepare(config, prompts=prompts)


def test_what_a_reward_gets_in_the_dry_run_is_whole(model: Path, tmp_path: Path) -> None:
    """A reward that reads a trajectory, and one that understands the answer alone."""

    def reward(response: str, answer: str, trajectory: dict[str, Any]) -> dict[str, float]:
        assert response == answer
        assert len(trajectory["logprobs"]) == len(trajectory["tokens"]) > 0
        return {"right": 1.0, "prompt": float(len(trajectory["prompt"]))}

    config = read_config(settings(model, tmp_path / "run"))
    found = preflight(prepare(config, prompts=[{"prompt": "a b", "answer": "c"}], reward=reward))
    assert found.tried.response == "c" and found.tried.shown == "a b"
    assert found.tried.parts == {
        "reward.right": 1.0,
        "reward.prompt": float(len(found.tried.tokens)),
    }


def test_the_prompt_of_an_environment_is_the_one_that_it_gives(model: Path, tmp_path: Path) -> None:
    """That of its row may be too long, or messages for a model without a chat template."""
    long = "the quick " * read_model(model).context
    config = read_config(settings(model, tmp_path / "run"))
    for prompt in (long, [{"role": "user", "content": "hello"}]):
        plan = prepare(config, prompts=[{"prompt": prompt}], environment=Room)
        found = preflight(plan).tried
        assert found.shown == "the quick fox"
        assert found.parts["environment"] == 1.0


def test_a_dry_run_can_be_left_out(model: Path, tmp_path: Path) -> None:
    config = read_config(settings(model, tmp_path / "run", task={"dry_run": False}))
    assert preflight(prepare(config, prompts=PROMPTS, reward=no_number)).tried.reward is None


def test_what_is_resumed_is_not_scored_again(model: Path, tmp_path: Path) -> None:
    """It has been; a reward that is away for a while must not keep a run from going on."""
    config = read_config(settings(model, tmp_path / "run"))
    plan = prepare(config, prompts=PROMPTS, reward=no_number)
    with pytest.raises(UserError, match="fails on the first prompt"):
        preflight(plan)
    assert preflight(replace(plan, resumed=True)).tried.reward is None


def test_long_prompts_are_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    long = "the quick " * read_model(model).context
    rows = [{"prompt": "a"}, {"prompt": long}, {"prompt": "b"}, {"prompt": long}]
    with pytest.raises(UserError, match=r"row 1 of .* tokens.*Shorten it, or set"):
        plan_of(model, tmp_path, rows)
    stream = plan_of(model, tmp_path, rows, task={"long_prompts": "skip"}).task.stream
    assert {prompt.text for prompt in stream.read(0, 40)} == {"a", "b"}
    assert stream.read(3, 1) == stream.read(0, 4)[3:], "a function of the position"
    with pytest.raises(UserError, match="from row 0 on are too long"):
        plan_of(model, tmp_path, [{"prompt": long}], task={"long_prompts": "skip"})


def test_an_evaluation_asks_the_first_that_fit_each_once(model: Path, tmp_path: Path) -> None:
    long = {"prompt": "the quick " * read_model(model).context}
    rows = [{"prompt": "a"}, long, {"prompt": "b"}, long, {"prompt": "c"}, long]

    def asked(size: int, long_prompts: str, rows: Any = rows) -> list[str]:
        task = {"eval_size": size, "long_prompts": long_prompts}
        config = read_config(settings(model, tmp_path / "run", task=task))
        stream = prepare(config, prompts=PROMPTS, eval_prompts=rows).task.eval_stream
        assert stream is not None
        return [str(prompt.text) for prompt in stream.read(0, 99)]

    assert asked(1, "refuse") == ["a"], "what is not read is not looked at"
    with pytest.raises(UserError, match="row 1 of"):
        asked(2, "refuse")
    assert asked(1, "skip") == ["a"]
    assert asked(2, "skip") == ["a", "b"]
    assert asked(9, "skip") == ["a", "b", "c"]
    assert asked(9, "skip", iter(rows)) == ["a", "b", "c"]
    with pytest.raises(UserError, match="from row 0 on are too long"):
        asked(9, "skip", [long])


def test_a_long_prompt_of_an_endless_source_ends_it_when_it_comes(
    model: Path, tmp_path: Path
) -> None:
    long = "the quick " * read_model(model).context

    def row(position: int, seed: int) -> str:
        return long if position == 100 else str(position)

    stream = plan_of(model, tmp_path, row).task.stream
    assert len(stream.read(0, 100)) == 100
    with pytest.raises(UserError, match="row 100 of"):
        stream.read(100, 1)
    stream = plan_of(model, tmp_path, row, task={"long_prompts": "skip"}).task.stream
    assert [prompt.text for prompt in stream.read(99, 3)] == ["99", "101", "101"]


def test_the_first_prompt_of_an_environment_is_refused(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "the quick " * read_model(model).context, "turns": 1}]
    sections = {"environment": f"{REWARDS}:Counting", "shuffle": False}
    with pytest.raises(UserError, match=r"environment of prompt 0 has a prompt of .* context"):
        preflight(plan_of(model, tmp_path, rows, task=sections))
    skip = {**sections, "long_prompts": "skip"}
    assert preflight(plan_of(model, tmp_path, rows, task=skip)).tried.tokens


def test_a_prompt_beyond_the_kv_budget_is_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    """With its response it would never fit, and the engine would refuse each try."""
    rows = [{"prompt": "a"}, {"prompt": "the quick " * 20}, {"prompt": "b"}]
    rollout = {"kv_budget_tokens": 64, "max_tokens": 32}
    with pytest.raises(UserError, match=r"row 1 of .*the KV of .* Raise rollout.kv_budget_tokens"):
        plan_of(model, tmp_path, rows, rollout=rollout)
    skip = {"task": {"long_prompts": "skip"}}
    stream = plan_of(model, tmp_path, rows, rollout=rollout, **skip).task.stream
    assert {prompt.text for prompt in stream.read(0, 20)} == {"a", "b"}


@given(
    prompt=st.integers(1, 70),
    max_tokens=st.integers(1, 70),
    budget=st.integers(32, 200),
)
def test_what_is_let_through_is_what_the_engine_takes(
    prompt: int, max_tokens: int, budget: int, model: Path
) -> None:
    rollout = {"kv_budget_tokens": budget, "max_tokens": max_tokens}
    config = read_config(settings(model, model / "unused", rollout=rollout))
    shape = replace(read_model(model), context=64)
    engine = EmbeddedEngine(shape, EngineSettings(slots=1, kv_budget_tokens=budget))
    request = Request(
        trajectory=0,
        version=0,
        prompt=(1,) * prompt,
        sampling=Sampling(max_tokens=max_tokens),
        seed=0,
    )
    try:
        engine._check(request)
    except RequestRefused:
        assert why_too_long(config, shape)(prompt) is not None
    else:
        assert why_too_long(config, shape)(prompt) is None


# Memory


def test_kv_is_that_of_the_container(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape = config_of(model, tmp_path), read_model(model)
    monkeypatch.setattr("dora_rl.machine.cgroups.memory_limit", lambda: 4096)
    assert memory_estimate.footprint(config, shape).kv == 1024


def config_of(model: Path, tmp_path: Path, **sections: Any) -> RunConfig:
    return read_config(settings(model, tmp_path / "run", **sections))


def test_a_footprint_by_hand(model: Path, tmp_path: Path) -> None:
    shape = read_model(model)
    parameters = sum(rows * more for rows, more in _matrices(shape.tensors()))
    config = config_of(
        model, tmp_path, rollout={"slots": 3, "max_tokens": 5, "deterministic": False}
    )
    found = memory_estimate.footprint(config, shape)
    assert found.trainer == 16 * parameters
    assert found.versions == 2 * 4 * parameters
    assert found.kv == 3 * 5 * 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    two = config_of(model, tmp_path, rollout={"deterministic": True}, runtime={"instances": 2})
    assert memory_estimate.footprint(two, shape).versions == 2 * found.versions


def test_without_a_spare_slot_one_version_is_in_memory(model: Path, tmp_path: Path) -> None:
    shape = read_model(model)
    spare, none = (
        memory_estimate.footprint(
            config_of(model, tmp_path, rollout={"spare_version_slot": wish}), shape
        )
        for wish in (True, False)
    )
    assert spare.versions == 2 * none.versions
    assert "for 2 versions," in str(spare) and "for 1 version," in str(none)


def _matrices(tensors: dict[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    return [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in tensors.values()]


@pytest.mark.parametrize(("limit_mb", "fits"), [(1 << 20, True), (64, False)])
def test_what_does_not_fit_is_refused_with_the_figures(
    limit_mb: int, fits: bool, model: Path, tmp_path: Path
) -> None:
    """The limit is a cgroup's, below the machine's memory."""
    keys = json.loads((model / "config.json").read_text())
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps({**keys, "num_hidden_layers": 1000}))
    root = tmp_path / "root"
    machine(root, 1 << 30)
    within(root, V2_MOUNT, "0::/user/run")
    write_v2(root / "sys/fs/cgroup/user/run", Group(limit=limit_mb << 20))
    config = config_of(large, tmp_path)
    if fits:
        assert memory_estimate.check(config, read_model(large), lambda: left(root)).total > 0
        return
    with pytest.raises(UserError, match=r"at least .*: .* trainer .* versions, .* KV; 64 MB"):
        memory_estimate.check(config, read_model(large), lambda: left(root))
    unwatched = config_of(large, tmp_path, runtime={"min_free_memory_mb": 0})
    memory_estimate.check(unwatched, read_model(large), lambda: left(root))
