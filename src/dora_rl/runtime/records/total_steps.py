"""How many steps a run takes in all, and how a resume raises that.

config.toml has the total. The journal has what the run was started for and, as an event, every time
that it was raised: a total that the core does not know of yet is told to it when the run continues.
"""

from pathlib import Path

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import CONFIG
from dora_rl.trainer.settings import Schedule

ENDED = "ended"  # the fact of a run that there is nothing to resume of
_ALL_TAKEN = "{} steps trained"  # as the core says it


def steps_trained(ledger: Ledger) -> int:
    """Of what the ledger has: step N publishes version N."""
    return max((row.version for row in ledger.versions()), default=0)


def with_total(
    run: Path, config: RunConfig, steps: int | None, *, first: int, trained: int, ended: str | None
) -> RunConfig:
    """The configuration of the rest of a run; `steps` is its new total, if it is to get one.

    It was started for `first`; its config.toml may have a larger total by now.
    """
    total = config.run.steps
    if ended == _ALL_TAKEN.format(trained):
        total = trained  # a larger one in config.toml was put there by hand, and told to nobody
    complete = trained >= total
    if ended is not None and (steps is None or not complete):
        more = f"Give --steps a total above {total}, or start" if complete else "Start"
        raise UserError(f"nothing to resume in `{run}`: {ended}. {more} a new run.")
    if total > first:
        _check_schedule(config)
    if steps is None or (steps == total and not complete):
        return config
    if steps <= total:
        raise UserError(
            f"--steps is the new total of a resumed run, above the {total} of `{run}`: `{steps}`. "
            "Give more."
        )
    _check_schedule(config)
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def _check_schedule(config: RunConfig) -> None:
    """Steps that are taken again would get another learning rate."""
    if config.train.schedule is not Schedule.CONSTANT:
        raise UserError(
            f"train.schedule ends with the last step, which more steps would move: "
            f"`{config.train.schedule}`. Start a new run from the checkpoint: set model.path to it."
        )


def check_total(run: Path, config: RunConfig, total: int) -> None:
    """Refuse a total below the one that was told to the core: admitted work counts on it."""
    if config.run.steps < total:
        raise UserError(
            f"run.steps in `{run / CONFIG}` was raised to {total}, and can only be raised: "
            f"`{config.run.steps}`. Put it back."
        )
