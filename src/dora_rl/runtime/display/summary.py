"""What a run came to, in a few lines for people."""

from collections.abc import Sequence

from dora_rl.observe.live import duration
from dora_rl.runtime.execution import Run
from dora_rl.runtime.records.step_metrics import StepRecord

_LABEL = 11  # columns of the names on the left


def outcome_lines(run: Run) -> list[str]:
    """How a run ended, what was learnt, and where it is."""
    rows = {"run": str(run.directory), **outcome_rows(run)}
    rows["audit"] = run.audit.headline()
    if run.checkpoint is not None:
        rows["checkpoint"] = str(run.checkpoint)
    return [first_line(run), *labelled(rows)]


def first_line(run: Run) -> str:
    """How far it came, how long that took, and why it ended."""
    count, took = len(run.steps), duration(run.summary.wall_s)
    done = f"{count} steps in {took}"
    if run.steps_before:
        done = f"{count} steps, {count - run.steps_before} of them since the resume in {took}"
    failed = not run.ending.ok and not run.ending.interrupted
    return f"{done}: {'FAILED: ' if failed else ''}{run.ending.reason}"


def outcome_rows(run: Run) -> dict[str, str]:
    """The figures of a run, by name."""
    summary, rewards, rows = run.summary, reward_span(run.steps), {}
    if rewards is not None:
        rows["reward"] = (
            f"{rewards[0]:.3f} -> {rewards[1]:.3f} "
            "(means of the first and the last fifth of the steps)"
        )
    if run.evaluations:
        ends = (run.evaluations[:1] if len(run.evaluations) > 1 else ()) + run.evaluations[-1:]
        rows["evaluation"] = " -> ".join(
            f"{end.reward_mean:.3f} (version {end.version})" for end in ends
        )
    if summary.steps:
        rows["rollout"] = (
            f"{summary.tokens_per_s:,.0f} trained tokens/s, bubble {summary.bubble_share:.1%}"
        )
        rows["staleness"] = (
            f"mean {summary.mean_staleness:.2f}, max {summary.max_staleness:g} "
            f"(K = {run.audit.max_staleness})"
        )
    return rows


def labelled(rows: dict[str, str]) -> list[str]:
    """Rows as lines, their names on the left."""
    return [f"{name:<{_LABEL}}{value}" for name, value in rows.items()]


def reward_span(steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Mean rewards of the first and of the last fifth of the steps."""
    if not steps:
        return None
    count = max(1, len(steps) // 5)
    ends = steps[:count], steps[-count:]
    first, last = (sum(record.reward_mean for record in part) / count for part in ends)
    return first, last
