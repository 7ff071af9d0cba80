"""Everything of a task that a run needs, opened from its settings or from Python objects."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dora_rl.samples import Trajectory
from dora_rl.sandbox.isolation import hidden_by
from dora_rl.sandbox.objects import label_of
from dora_rl.sandbox.pool import Pool, PoolOptions
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks import fingerprints as fp
from dora_rl.tasks.encoding import Encoder
from dora_rl.tasks.environment_pool import EnvironmentPool
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.long_prompts import Fitting, WhyTooLong, problem, refusal
from dora_rl.tasks.prompts import Prompt, PromptStream, prompt_of
from dora_rl.tasks.scores import ScoreJob, ScorePool
from dora_rl.tasks.settings import RewardSettings, TaskSettings
from dora_rl.tasks.sources import Row, Source, code_behind, open_source

Reward: TypeAlias = str | Callable[..., Any]
Rewards: TypeAlias = Reward | Sequence[Reward] | Mapping[str, Reward]
Fitted: TypeAlias = Callable[[Source, int | None], Source]
_Pool = TypeVar("_Pool", bound=Pool[Any])


class Task:
    """Prompts, encoder, rewards and environment of one run."""

    def __init__(
        self,
        settings: TaskSettings,
        *,
        stream: PromptStream,
        eval_stream: PromptStream | None,
        encoder: Encoder | None,
        rewards: tuple[UserFunction, ...],
        environment: UserFunction | None,
        hidden: tuple[str, ...] = (),
        why_too_long: WhyTooLong | None = None,
    ) -> None:
        self.settings = settings
        self._why_too_long = why_too_long
        self._hidden = hidden
        self.stream = stream
        self.eval_stream = eval_stream
        self.rewards = rewards
        self._encoder = encoder
        self._environment = environment
        self.gaps: tuple[str, ...] = ()
        """What workers can access on this system; known once some have been started."""

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
        hidden: Sequence[Path] = (),
        why_too_long: WhyTooLong | None = None,
    ) -> "Task":
        """Open what the settings name; an object given here stands in for a name.

        Without a model directory there is no encoder. `hidden` are directories that rewards and
        environments are not to see, as far as the system can keep them from it. Prompts that
        are too long are refused or left out; those that an environment makes are
        checked by `encode_opening`.
        """
        unseen = tuple(os.path.realpath(path) for path in hidden)
        writable = _directories(settings.writable, unseen)
        settings = settings.model_copy(update={"writable": writable})
        rewards = reward_functions(settings.reward if reward is None else reward)
        environment = settings.environment if environment is None else environment
        if not rewards and environment is None:
            raise TaskError(
                "task.reward is missing. Name a reward, or an environment that gives it."
            )
        if prompts is None and settings.prompts is None:
            raise TaskError(
                "task.prompts is missing. Name a JSONL file, or pass --set task.prompts=…"
            )
        encoder = None if model_directory is None else Encoder(model_directory, settings)
        fitted: Fitted | None = None
        if encoder is not None and why_too_long is not None and environment is None:
            fitted = functools.partial(
                _fitted, settings=settings, encoder=encoder, why_too_long=why_too_long
            )
        source = settings.prompts if prompts is None else prompts
        return cls(
            settings,
            stream=_stream(settings, source, settings.options, seed, fitted=fitted),
            eval_stream=_eval_stream(settings, eval_prompts, seed, fitted),
            encoder=encoder,
            rewards=rewards,
            environment=None
            if environment is None
            else UserFunction(name=label_of(environment), function=environment),
            hidden=unseen,
            why_too_long=why_too_long,
        )

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            raise TaskError("this task has no model. Open it with a model directory.")
        return self._encoder

    @property
    def has_environment(self) -> bool:
        return self._environment is not None

    def encode_opening(self, prompt: Prompt, observation: Any) -> tuple[int, ...]:
        """The tokens of a prompt that an environment has begun with `observation`.

        One that is too long ends the run, unless it is to be left out: the engine refuses it.
        """
        tokens = tuple(self.encoder.encode(prompt, observation))
        if self._why_too_long is not None and self.settings.long_prompts == "refuse":
            found = problem(self._why_too_long, len(tokens))
            if found is not None:
                raise refusal(f"the environment of prompt {prompt.position}", found)
        return tokens

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
        return self._started(ScorePool(self.rewards, **self.pool_options))

    def environment_pool(self) -> EnvironmentPool:
        """Workers for the environment; the caller closes them."""
        if self._environment is None:
            raise TaskError("task.environment is missing. Name a class: module:Class.")
        return self._started(EnvironmentPool(self._environment, **self.pool_options))

    @property
    def pool_options(self) -> PoolOptions:
        """How its workers are limited."""
        return {
            "workers": self.settings.reward_workers,
            "timeout_s": self.settings.reward_timeout_s,
            "memory_mb": self.settings.reward_memory_mb,
            "network": self.settings.reward_network,
            "writable": self.settings.writable,
            "hidden": self._hidden,
            "import_path": tuple(map(os.path.abspath, self.settings.import_path)),
        }

    def _started(self, pool: _Pool) -> _Pool:
        self.gaps = tuple(dict.fromkeys((*self.gaps, *pool.isolation.gaps())))
        return pool

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Digests of the prompts, the tokenizer with its template, the rewards, the environment.

        Of a reward or an environment: its name, its options, and the file that it stands in. As
        they were when they were first asked for: what a resume accepts is what it then records.
        What cannot be read is `UNREADABLE`.
        """
        environment = [] if self._environment is None else [self._environment]
        more = self.settings.import_path
        streams = [s.fingerprint for s in (self.stream, self.eval_stream) if s is not None]
        prompts: Any = streams if len(streams) > 1 else streams[0]
        return {
            "prompts": fp.UNREADABLE if fp.UNREADABLE in streams else fp.digest(prompts),
            "tokenizer": fp.digest(None if self._encoder is None else self._encoder.fingerprint),
            "reward": fp.of_functions(self.rewards, "task.reward", more),
            "environment": fp.of_functions(environment, "task.environment", more),
        }


def reward_functions(reward: Any) -> tuple[UserFunction, ...]:
    """Rewards in any form that settings or the Python API have them, as functions with names."""
    if reward is None:
        return ()
    if isinstance(reward, Mapping):
        return tuple(
            UserFunction(name=name, function=function) for name, function in reward.items()
        )
    if isinstance(reward, str) or callable(reward):
        reward = [reward]
    if not isinstance(reward, Iterable):
        raise _no_reward(reward)
    functions = []
    for entry in reward:
        if isinstance(entry, UserFunction):
            functions.append(entry)
        elif isinstance(entry, str) or callable(entry):
            functions.append(UserFunction(name=label_of(entry), function=entry))
        elif not isinstance(entry, RewardSettings):
            raise _no_reward(entry)
        else:
            function = entry.function or entry.name
            functions.append(
                UserFunction(
                    name=entry.name or label_of(function),
                    function=function,
                    weight=entry.weight,
                    options=entry.options,
                )
            )
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TaskError(f"task.reward has two of one name: `{twice}`. Give each a name of its own.")
    return tuple(functions)


def _no_reward(found: Any) -> TaskError:
    return TaskError(
        f"task.reward must be a function, its name, or several of them: `{found!r:.60}`. "
        "Give what scores a response."
    )


def _directories(names: Sequence[str], unseen: tuple[str, ...]) -> tuple[str, ...]:
    """Where workers may write, by names that mean the same to them and to a resume."""
    for name in names:
        if not os.path.isdir(name):
            raise TaskError(
                f"task.writable must name directories that exist: `{name}` is none. "
                "Make it, or leave it out."
            )
        place = hidden_by(os.path.realpath(name), unseen)
        if place is not None:
            raise TaskError(
                f"task.writable must name directories that workers see: `{name}` is in `{place}`, "
                "which is hidden from them. Name one elsewhere."
            )
    return tuple(os.path.realpath(name) for name in names)


def _stream(
    settings: TaskSettings,
    prompts: Any,
    options: Mapping[str, Any],
    seed: int,
    limit: int | None = None,
    *,
    fitted: Fitted | None = None,
) -> PromptStream:
    source = open_source(
        prompts,
        seed=seed,
        key=settings.prompt_key,
        options=options,
        check=prompt_of,
        import_path=settings.import_path,
    )
    return PromptStream(
        source if fitted is None else fitted(source, limit),
        seed=seed,
        shuffle=settings.shuffle,
        epochs=settings.epochs,
        prompt_key=settings.prompt_key,
        answer_key=settings.answer_key,
        limit=limit,
        code=code_behind(prompts, settings.import_path),
    )


def _eval_stream(
    settings: TaskSettings, prompts: Any, seed: int, fitted: Fitted | None
) -> PromptStream | None:
    """The prompts of evaluations, once and in order; None if neither names any."""
    found = settings.eval_prompts if prompts is None else prompts
    if found is None:
        return None
    once = settings.model_copy(update={"shuffle": False, "epochs": 1})
    return _stream(once, found, settings.eval_options, seed, settings.eval_size, fitted=fitted)


def _fitted(
    source: Source,
    limit: int | None,
    settings: TaskSettings,
    encoder: Encoder,
    why_too_long: WhyTooLong,
) -> Source:
    """The source without prompts that leave no room for a response.

    The first rows are checked; with a limit, as for an evaluation, those that will be read.
    """

    def problem_of(row: Row) -> str | None:
        content = prompt_of(row, settings.prompt_key, source.name)
        return problem(why_too_long, encoder.length(content))

    fitting = Fitting(source, problem_of, skip=settings.long_prompts == "skip")
    if limit is not None:
        return fitting.first(limit)
    fitting.check()
    return fitting
