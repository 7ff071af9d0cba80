"""`dora_rl.train` and `dora_rl.resume`: from Python objects, or a directory, to a finished run."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora_rl.runtime.execution import Run, carry_out
from dora_rl.runtime.prepare import config_file
from dora_rl.runtime.prepare.keywords import with_sections
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.runtime.records.step_metrics import Watcher


def train(
    model: str | Path,
    prompts: Any = None,
    reward: Any = None,
    *,
    environment: Any = None,
    eval_prompts: Any = None,
    max_staleness: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    watch: Sequence[Watcher] = (),
    progress: bool = True,
    **options: Any,
) -> Run:
    """Train a language model with multi-version streaming rollout.

    `model` is a Hugging Face directory or a packaged model's name; `prompts` a list, a dataset,
    a generator function, or a JSONL file's path; `reward` a function of the response and the
    example. Anything else of the configuration goes into `config` or, by section, into
    `options`: `train(…, rollout={"slots": 64}, orchestration={"group_size": 4})`.
    `watch` are functions that are told of every step; with `progress`, stderr shows how it goes.
    What was stopped or killed is resumed by `dora_rl.resume`.
    """
    data: dict[str, Any] = {}
    if config is not None:
        data = config_file.load(config) if not isinstance(config, Mapping) else _copy(config)
    data = with_sections(data, options, _KEYWORDS)
    _put(data, "model", "path", str(model))
    _put(data, "orchestration", "max_staleness", max_staleness)
    _put(data, "run", "steps", steps)
    _put(data, "run", "out", None if out is None else str(out))
    objects: dict[str, Any] = {
        "prompts": prompts,
        "reward": reward,
        "environment": environment,
        "eval_prompts": eval_prompts,
    }
    for name, value in objects.items():
        if isinstance(value, str | Path):  # which a file can hold, and a resume find there
            _put(data, "task", name, str(value))
            objects[name] = None
    return carry_out(prepare(read_config(data), **objects), watch=watch, progress=progress)


_KEYWORDS = frozenset(inspect.signature(train).parameters) - {"options"}


def resume(
    run: str | Path,
    *,
    prompts: Any = None,
    reward: Any = None,
    environment: Any = None,
    eval_prompts: Any = None,
    steps: int | None = None,
    accept_changed: Collection[str] = (),
    secrets: Sequence[str] = (),
    watch: Sequence[Watcher] = (),
    progress: bool = True,
) -> Run:
    """Go on with a run that was stopped or killed, to its end, or beyond it.

    It continues as it was configured, but for `steps`: a new total, for a run that is to take more
    steps than it was started for, whether it was stopped or had come to its end. Objects that it
    was started with (prompts, a reward, an environment) are given again, and so are secrets of its
    configuration, as `section.key=value`: no file holds them. What of `prompts`, `tokenizer`,
    `reward`, `environment` and `model` changed on purpose is named in `accept_changed`.
    """
    plan = plan_resume(
        run,
        prompts=prompts,
        reward=reward,
        environment=environment,
        eval_prompts=eval_prompts,
        steps=steps,
        accept_changed=accept_changed,
        secrets=secrets,
    )
    return carry_out(plan, watch=watch, progress=progress)


def _put(data: dict[str, Any], section: str, key: str, value: Any) -> None:
    if value is not None:
        data[section] = {**data.get(section, {}), key: value}


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        section: dict(values) if isinstance(values, Mapping) else values
        for section, values in config.items()
    }
