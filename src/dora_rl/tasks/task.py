"""Everything of a task that a run needs, opened from its settings or from Python objects."""

import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dora_rl.samples import Trajectory
from dora_rl.tasks.encoding import Encoder
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.names import label_of, name_of
from dora_rl.tasks.prompts import Prompt, PromptStream, prompt_of
from dora_rl.tasks.settings import TaskSettings
from dora_rl.tasks.sources import open_source
from dora_rl.tasks.workers.isolation import hidden_by
from dora_rl.tasks.workers.pool import Pool
from dora_rl.tasks.workers.scores import ScoreJob, ScorePool
from dora_rl.tasks.workers.sessions import EnvironmentPool
from dora_rl.tasks.workers.wire import Part

Reward: TypeAlias = str | Callable[..., Any]
Rewards: TypeAlias = Reward | Sequence[Reward] | Mapping[str, Reward]
_Pool = TypeVar("_Pool", bound=Pool)


class Task:
    """Prompts, encoder, rewards and environment of one run."""

    def __init__(
        self,
        settings: TaskSettings,
        *,
        stream: PromptStream,
        eval_stream: PromptStream | None,
        encoder: Encoder | None,
        rewards: tuple[Part, ...],
        environment: Part | None,
    ) -> None:
        self.settings = settings
        self.stream = stream
        self.eval_stream = eval_stream
        self.rewards = rewards
        self._encoder = encoder
        self._environment = environment
        self.gaps: tuple[str, ...] = ()
        """What this system does not keep from the workers; known once some have been started."""

    @classmethod
    def open(
        cls,
        settings: TaskSettings,
        *,
        model_directory: str | Path | None,
        seed: int,
        reward: Rewards | None = None,
        prompts: Any = None,
        environment: str | Callable[..., Any] | None = None,
        eval_prompts: Any = None,
    ) -> "Task":
        """Open what the settings name; an object given here stands in for a name.

        Without a model directory there is no encoder.
        """
        settings = settings.model_copy(update={"writable": _directories(settings.writable)})
        rewards = reward_parts(settings.reward if reward is None else reward)
        environment = settings.environment if environment is None else environment
        if not rewards and environment is None:
            raise TaskError(
                "task.reward is missing. Name a reward, or an environment that gives it."
            )
        if prompts is None and settings.prompts is None:
            raise TaskError(
                "task.prompts is missing. Name a JSONL file, or pass --set task.prompts=…"
            )
        stream = _stream(
            settings, settings.prompts if prompts is None else prompts, settings.options, seed
        )
        evaluate = settings.eval_prompts if eval_prompts is None else eval_prompts
        once = settings.model_copy(update={"shuffle": False, "epochs": 1})
        eval_stream = (
            None
            if evaluate is None
            else _stream(once, evaluate, settings.eval_options, seed, settings.eval_size)
        )
        return cls(
            settings,
            stream=stream,
            eval_stream=eval_stream,
            encoder=None if model_directory is None else Encoder(model_directory, settings),
            rewards=rewards,
            environment=None
            if environment is None
            else Part(name=label_of(environment), function=environment),
        )

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            raise TaskError("this task has no model. Open it with a model directory.")
        return self._encoder

    @property
    def has_environment(self) -> bool:
        return self._environment is not None

    def job(self, prompt: Prompt, response: str, trajectory: Trajectory | None = None) -> ScoreJob:
        """What the rewards are to judge."""
        return ScoreJob(
            response=response,
            prompt=prompt.text if prompt.text is not None else list(prompt.messages or ()),
            example=prompt.example,
            answer=prompt.answer,
            trajectory=trajectory,
        )

    def score_pool(self) -> ScorePool:
        """Workers for the rewards; the caller closes them."""
        if not self.rewards:
            raise TaskError("task.reward is missing: the rewards are the environment's.")
        return self._started(ScorePool(self.rewards, **self._limits))

    def environment_pool(self) -> EnvironmentPool:
        """Workers for the environment; the caller closes them."""
        if self._environment is None:
            raise TaskError("task.environment is missing. Name a class: module:Class.")
        return self._started(EnvironmentPool(self._environment, **self._limits))

    @property
    def _limits(self) -> dict[str, Any]:
        return {
            "workers": self.settings.reward_workers,
            "timeout_s": self.settings.reward_timeout_s,
            "memory_mb": self.settings.reward_memory_mb,
            "network": self.settings.reward_network,
            "writable": self.settings.writable,
        }

    def _started(self, pool: _Pool) -> _Pool:
        self.gaps = tuple(dict.fromkeys((*self.gaps, *pool.isolation.gaps())))
        return pool

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Digests of the prompts, the tokenizer with its template, the rewards, the environment.

        Of a reward or an environment: its name, its options, and the file that it stands in. As
        they were when they were first asked for: what a resume accepts is what it then records.
        """
        environment = [] if self._environment is None else [self._environment]
        return {
            "prompts": _digest(self.stream.fingerprint),
            "tokenizer": _digest(None if self._encoder is None else self._encoder.fingerprint),
            "reward": _digest([_described(part) for part in self.rewards]),
            "environment": _digest([_described(part) for part in environment]),
        }


def reward_parts(reward: Any) -> tuple[Part, ...]:
    """Rewards in any form that settings or the Python API have them, as parts with names."""
    if reward is None:
        return ()
    if isinstance(reward, Mapping):
        return tuple(Part(name=name, function=function) for name, function in reward.items())
    if isinstance(reward, str) or callable(reward):
        reward = [reward]
    parts = []
    for entry in reward:
        if isinstance(entry, Part):
            parts.append(entry)
        elif isinstance(entry, str) or callable(entry):
            parts.append(Part(name=label_of(entry), function=entry))
        else:
            function = entry.function or entry.name
            parts.append(
                Part(
                    name=entry.name or label_of(function),
                    function=function,
                    weight=entry.weight,
                    options=entry.options,
                )
            )
    names = [part.name for part in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TaskError(f"task.reward has two of one name: `{twice}`. Give each a name of its own.")
    return tuple(parts)


def _directories(names: Sequence[str]) -> tuple[str, ...]:
    """Where workers may write, by names that mean the same to them and to a resume."""
    for name in names:
        if not os.path.isdir(name):
            raise TaskError(
                f"task.writable must name directories that exist: `{name}` is none. "
                "Make it, or leave it out."
            )
        place = hidden_by(os.path.realpath(name))
        if place is not None:
            raise TaskError(
                f"task.writable must name directories that workers see: `{name}` is in `{place}`, "
                "which is kept from them. Name one elsewhere."
            )
    return tuple(os.path.realpath(name) for name in names)


def _stream(
    settings: TaskSettings,
    prompts: Any,
    options: Mapping[str, Any],
    seed: int,
    limit: int | None = None,
) -> PromptStream:
    source = open_source(
        prompts, seed=seed, key=settings.prompt_key, options=options, check=prompt_of
    )
    return PromptStream(
        source,
        seed=seed,
        shuffle=settings.shuffle,
        epochs=settings.epochs,
        prompt_key=settings.prompt_key,
        answer_key=settings.answer_key,
        limit=limit,
    )


def _described(part: Part) -> list[Any]:
    function = part.function
    shown = function if isinstance(function, str) else name_of(function) or part.name
    return [part.name, shown, part.weight, part.options, _source(function)]


def _source(function: Any) -> str | None:
    """The text of the file that a function stands in, where there is one; nothing is imported."""
    if isinstance(function, str):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(function.partition(":")[0])
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                return Path(spec.origin).read_text(encoding="utf-8", errors="replace")
        return None
    with suppress(OSError, TypeError):
        return inspect.getsource(function)
    return None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
