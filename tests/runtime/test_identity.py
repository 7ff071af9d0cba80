"""What a resume refuses as another run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.runtime.records.identity import check_same, identity
from dora_rl.tasks.fingerprints import UNREADABLE


def test_code_that_cannot_be_read_is_refused_unless_accepted() -> None:
    """It was as unreadable when the run was started: nobody knows whether it is the same."""
    facts = {"config": {}, "parts": {"reward": UNREADABLE, "prompts": "abc"}}
    with pytest.raises(UserError, match=r"reward: the code of the reward cannot be read.*\n.*"):
        check_same(Path("run"), facts, facts, {})
    check_same(Path("run"), facts, facts, {}, accepted=["reward"])


@pytest.mark.parametrize(("key", "value"), [("long_prompts", "skip"), ("dry_run", False)])
def test_what_is_only_checked_may_change(key: str, value: Any, tmp_path: Path) -> None:
    """A prompt that is too long may be found late, and a judge may be away at a resume."""
    task = {"prompts": "rows.jsonl", "reward": "exact"}
    before, now = (
        identity(
            read_config({"model": {"path": "quickstart"}, "task": section}),
            SimpleNamespace(fingerprints={}),  # type: ignore[arg-type]
            tmp_path,
        )
        for section in (task, {**task, key: value})
    )
    check_same(Path("run"), before, now, {"task": {key: value}})


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("device", "cuda", "cpu"),
        ("processes", 4, 2),
        ("rendezvous", "10.0.0.7:29500", "10.0.0.8:29500"),
        ("threads", 8, 1),
    ],
)
def test_a_run_goes_on_elsewhere(key: str, old: Any, new: Any, tmp_path: Path) -> None:
    """On another device, and with other processes: checkpoints hold none of that."""
    before, now = (
        identity(
            read_config({"model": {"path": "quickstart"}, "train": {key: value}}),
            SimpleNamespace(fingerprints={}),  # type: ignore[arg-type]
            tmp_path,
        )
        for value in (old, new)
    )
    check_same(Path("run"), before, now, {"train": {key: new}})
    before["config"]["train"][key] = old  # as in a ledger that still has it
    check_same(Path("run"), before, now, {"train": {key: new}})
    before["config"]["train"]["minibatches"] = 7
    with pytest.raises(UserError, match=r"train.minibatches: was `7`, is `1`"):
        check_same(Path("run"), before, now, {"train": {key: new}})
