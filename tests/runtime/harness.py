"""Small runs for tests: a model directory, configurations, and what a run left behind."""

import json
from pathlib import Path
from typing import Any

from dora_rl.core.journal import Record, read_journal
from dora_rl.core.replay import replay
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.train import Run, execute, prepare, read_config
from dora_rl.store.rundir import JOURNAL, JournalFile, find_journals
from tests.models.random_models import make_model, make_tokenizer

VOCABULARY = 300
REWARDS = "tests.runtime.rewards"
PROMPTS = [{"prompt": f"the quick {word}", "turns": 3} for word in "fox dog cat hen owl bee".split()]


def make_tiny(directory: Path) -> Path:
    """A llama of two layers whose tokenizer has every token."""
    make_model(directory, "llama", seed=1, vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=0)
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory


def settings(model: Path, out: Path | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration as TOML has it; sections are merged into the defaults of the tests."""
    data: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"reward": f"{REWARDS}:vowels", "reward_workers": 1},
        "train": {"learning_rate": 0.01, "threads": 1},
        "rollout": {"slots": 8, "max_tokens": 16},
        "orchestration": {"groups_per_step": 2, "group_size": 2, "max_staleness": 2},
        "runtime": {"kind": "inline", "rollout_threads": 1, "train_threads": 1},
        "run": {"steps": 4},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    if out is not None:
        data["run"]["out"] = str(out)
    return data
