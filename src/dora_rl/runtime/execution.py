"""A plan, run to its end; what ends there is a run that can be audited, whatever happened."""

import errno
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dora_rl.core.audit import AuditReport
from dora_rl.observe.metrics import Summary
from dora_rl.runtime.control.evaluator import EvalRecord, EvalWatcher
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.launchers.registry import launch
from dora_rl.runtime.prepare.plan import Plan
from dora_rl.runtime.prepare.preflight import check_memory, preflight
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.runtime.records.run_log import RunLog
from dora_rl.runtime.records.step_metrics import StepRecord, Watcher, read_records
from dora_rl.store.rundir import METRICS_OF_STEPS, checkpoint_path, checkpoints_in

_log = logging.getLogger(__name__)
_SEE_DOCTOR = "`dora-rl doctor` tells what this machine lacks"


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run that has ended: how, where it is, and what it came to.

    `ok` says whether it ended well; `steps` and `evaluations` have what `metrics.jsonl` has.
    """

    directory: Path
    ending: Ending
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvalRecord, ...]
    summary: Summary
    audit: AuditReport
    steps_before: int = 0
    """Steps that it had been trained for when it was resumed."""

    def __repr__(self) -> str:
        """What `print` shows: how it ended, in a few lines."""
        from dora_rl.runtime.display.summary import outcome_lines

        return "\n".join(outcome_lines(self))

    @property
    def ok(self) -> bool:
        """It ended well, and no promise was broken."""
        return self.ending.ok and self.audit.ok

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint: a Hugging Face model directory."""
        found = checkpoints_in(self.directory / "checkpoints")
        return found[-1][1] if found else None


def execute(
    plan: Plan,
    *,
    watch: Sequence[Watcher] = (),
    watch_evaluations: Sequence[EvalWatcher] = (),
    listeners: Sequence[Listener] = (),
    stopping: Callable[[], object] = lambda: None,
    warmup_steps: int = 0,
) -> Run:
    """Run a plan to its end; `watch` is told of every step, `listeners` of all that happens.

    `stopping` is called, from the signal's handler, when the user asks the run to stop.
    """
    check_memory(plan)  # again: a dry run takes its time, and not every caller makes one
    begin = time.perf_counter()
    while True:
        with (
            _full_disk_named(plan.out),
            RunFiles(
                plan,
                watch,
                watch_evaluations=watch_evaluations,
                listeners=[RunLog(), *listeners],
                warmup_steps=warmup_steps,
            ) as files,
        ):
            _tell_start(files)
            runtime = launch(files)
            ending = Ending(False, "the run failed")
            try:
                with _interruptible(runtime.stop, stopping):
                    ending = runtime.run()
            except BaseException as error:
                ending = Ending(False, f"{type(error).__name__}: {error}")
                if isinstance(error, RunFailed) and files.orchestrator.state.trainer.step == 0:
                    raise RunFailed(f"{str(error).rstrip('.')}. {_SEE_DOCTOR}") from error
                raise
            finally:
                _log.info("run `%s` ends: %s", plan.out, ending.reason)
                summary, audit = files.close(ending, time.perf_counter() - begin)
        if not ending.paused:
            break
        plan = replace(plan, resumed=True)
    records = read_records(plan.out / METRICS_OF_STEPS)
    steps = tuple(record for record in records if isinstance(record, StepRecord))
    evaluations = tuple(record for record in records if isinstance(record, EvalRecord))
    return Run(plan.out, ending, steps, evaluations, summary, audit, plan.steps_trained)


def _tell_start(files: RunFiles) -> None:
    """Log whether the run is new, or from where it is resumed."""
    if not files.plan.resumed:
        _log.info("run `%s` begins", files.plan.out)
        return
    step = files.committer.last_checkpoint
    _log.info(
        "run `%s` resumes at step %d: %d journal records, last checkpoint %s",
        files.plan.out,
        files.orchestrator.state.trainer.step,
        files.ledger.position.records,
        "none" if step is None else checkpoint_path(files.checkpoints, step),
    )


def carry_out(plan: Plan, *, watch: Sequence[Watcher] = (), progress: bool = True) -> Run:
    """Try a plan, then run it to its end; with `progress`, stderr shows how it goes."""
    preflight(plan)
    if not progress:
        return execute(plan, watch=watch)
    from dora_rl.runtime.display.progress import execute_shown

    return execute_shown(plan, sys.stderr, watch=watch)


@contextmanager
def _full_disk_named(out: Path) -> Iterator[None]:
    """The journal grows by buffered writes, whose errors do not say where."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunFailed(
            f"No space left on device for the run: `{out}`. Free some, or set run.out elsewhere."
        ) from error


@contextmanager
def _interruptible(*stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C once asks the run to stop; twice ends it at once. Only the main thread hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for tell in stop:
            tell()

    before = {number: signal.signal(number, once) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
