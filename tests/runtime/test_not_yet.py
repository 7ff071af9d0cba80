"""Words that newcomers look for are answered at once, in the README too."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import dora_rl
from dora_rl import cli
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.prepare.not_yet import NOT_YET

ROOT = Path(__file__).parents[2]


def refused(*args: str) -> str:
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        assert cli.main(["train", *args]) == 2
    assert said.getvalue().count("\n") == 1
    return said.getvalue()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "rollout.engine=sglang"], "rollout.engine is `embedded` or `vllm`"),
        (["--set", "train.devices=2"], "A GPU is set by train.device"),
        (["--set", "runtime.gpus=2"], "A GPU is set by train.device"),
        (["--set", "train.qlora=true"], "LoRA is set by model.lora"),
        (["--set", "model.peft.r=8"], "LoRA is set by model.lora"),
        (["--set", "run.wandb=true"], "metrics.jsonl"),
        (["--set", "runtime.kind=slurm"], "runtime.kind=ray"),
        (["--wandb"], "metrics.jsonl"),
        (["--gpu", "0"], "A GPU is set by train.device"),
    ],
)
def test_what_is_not_there_yet_is_said(args: list[str], words: str) -> None:
    said = refused(*args)
    assert words in said
    assert "Did you mean" not in said


def test_python_says_the_same() -> None:
    with pytest.raises(UserError, match=r"A GPU is set by train.device"):
        dora_rl.train("quickstart", ["x"], "exact", gpus=2)


def test_other_mistakes_are_answered_as_before() -> None:
    assert "Did you mean `rollout.slots`?" in refused("--set", "rollout.slot=3")
    assert "Did you mean `model.lora`" in refused("--set", "train.lora_rank=8")
    assert "dora-rl train --help" in refused("--stepps", "3")


@pytest.mark.parametrize("value", ["data/vllm.jsonl", "engine/prompts.jsonl", "hf:ray/gpu-math"])
def test_a_value_that_merely_contains_such_a_word_is_not_what_was_asked_for(value: str) -> None:
    said = refused("--set", f"task.promts={value}")
    assert "Did you mean `task.prompts`?" in said
    assert "not supported yet" not in said


def test_no_key_of_ours_is_said_to_be_missing() -> None:
    for name, section in RunConfig.model_fields.items():
        keys = getattr(section.annotation, "__annotations__", {})
        assert not {name, *keys} & set(NOT_YET)


def test_the_readme_says_so_too() -> None:
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    for word in ("GPU", "CUDA", "LoRA", "wandb", "vLLM", "Ray"):
        assert word in limits
