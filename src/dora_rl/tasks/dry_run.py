"""The first prompt of a task, tried before a run: encoded, and a response to it scored.

No model is asked: the response is the row's answer, or nothing. A reward or an environment may
refuse one or the other, and does no harm in a run by that; one that fails on all of them would
fail on the very first trajectory too, and is refused now.
"""

from dataclasses import dataclass, field

from dora_rl.samples import Trajectory
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.task import Task

_FIX = "Fix it, or set task.dry_run=false if it only fails on what no model wrote"
_PATIENCE = 3.0  # times the time limit of a call: workers are started, and may be replaced


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it; the prompt as tokens, `shown` as the model sees it."""

    prompt: Prompt
    tokens: tuple[int, ...]
    shown: str
    response: str = ""
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


def try_task(task: Task, *, dry_run: bool) -> Tried:
    """Start the workers and, in a dry run, score a response to the first prompt.

    What cannot be started or scored is refused. An environment says what the first prompt is:
    without a dry run it is not known.
    """
    (prompt,) = task.stream.read(0, 1)
    tokens: tuple[int, ...] = ()
    episode: tuple[str, float] | None = None
    if task.has_environment:
        tokens, episode = _try_environment(task, prompt, dry_run=dry_run)
    else:
        tokens = tuple(task.encoder.encode(prompt))
    found = Tried(prompt, tokens, task.encoder.shown(tokens))
    if task.rewards:
        found = _try_rewards(task, found, dry_run=dry_run)
    if episode is not None:
        response, reward = episode
        parts = {**found.parts, "environment": reward}
        found = Tried(prompt, tokens, found.shown, response, (found.reward or 0.0) + reward, parts)
    return found


def _responses(prompt: Prompt) -> list[str]:
    """What a model might have written, without one: the likeliest to be understood first."""
    answer = [] if prompt.answer is None else [str(prompt.answer)]
    return list(dict.fromkeys([*answer, "", prompt.text or "1"]))


def _try_rewards(task: Task, found: Tried, *, dry_run: bool) -> Tried:
    failure = ""
    with task.score_pool() as pool:
        if not dry_run:
            return found
        for response in _responses(found.prompt):
            outcome = pool.run(task.job(found.prompt, response, _trajectory(found, response, task)))
            if outcome.failure is None:
                return Tried(
                    found.prompt, found.tokens, found.shown, response, outcome.reward, outcome.parts
                )
            failure = failure or outcome.failure
    raise TaskError(f"task.reward fails on the first prompt: {failure.rstrip('.')}. {_FIX}.")


def _trajectory(found: Tried, response: str, task: Task) -> Trajectory:
    tokens = tuple(task.encoder.encode_text(response))
    return Trajectory(
        id=0,
        group=0,
        version=0,
        prompt=found.tokens,
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        segments=(),
        truncated=False,
    )


def _try_environment(
    task: Task, prompt: Prompt, *, dry_run: bool
) -> tuple[tuple[int, ...], tuple[str, float] | None]:
    """The tokens of the first observation, and the first turn's response and reward."""
    failure = ""
    with task.environment_pool() as pool:
        if not dry_run:
            return (), None
        wait_s = _PATIENCE * task.settings.reward_timeout_s + 60.0
        for ticket, response in enumerate(_responses(prompt)):
            pool.open(ticket, prompt.example)
            opened = pool.poll(wait_s)
            if not opened or opened[0].failure is not None:
                why = opened[0].failure if opened else "no answer"
                raise TaskError(
                    f"task.environment fails on the first prompt: {str(why).rstrip('.')}. {_FIX}."
                )
            tokens = task.encode_opening(prompt, opened[0].observation)
            pool.step(ticket, response)
            stepped = pool.poll(wait_s)
            if stepped and stepped[0].failure is None:
                return tokens, (response, stepped[0].reward)
            failure = failure or str(stepped[0].failure if stepped else "no answer")
    raise TaskError(f"task.environment fails on the first prompt: {failure.rstrip('.')}. {_FIX}.")
