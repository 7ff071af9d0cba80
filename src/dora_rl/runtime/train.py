"""`train`: from a configuration, or from Python objects, to a finished run.

Everything is checked before the run directory is made; what ends there is a run that can be
audited, whatever happened.
"""

import errno
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.config import apply_overrides, load_toml, validate
from dora_rl.config.redaction import hidden_keys
from dora_rl.core.audit import AuditReport
from dora_rl.core.errors import UserError
from dora_rl.extras import require
from dora_rl.machine.trials import in_child
from dora_rl.observe.metrics import Summary
from dora_rl.runtime.base import Runtime
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.evaluation import EvalRecord, EvalWatcher
from dora_rl.runtime.identity import check_same, identity
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.memory import Watch
from dora_rl.runtime.recording import StepRecord, Watcher, read_records
from dora_rl.runtime.session import Ending, Plan, Session
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import CONFIG, LEDGER, METRICS_OF_STEPS, checkpoints_in
from dora_rl.tasks.task import Task
from dora_rl.trainer.settings import Dtype

USER = "dora-rl train"
_SEE_DOCTOR = "`dora-rl doctor` tells what this machine lacks"


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended: how, where it is, and what it came to."""

    directory: Path
    ending: Ending
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvalRecord, ...]
    summary: Summary
    audit: AuditReport

    @property
    def ok(self) -> bool:
        """It ended well, and no promise was broken."""
        return self.ending.ok and self.audit.ok

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint: a Hugging Face model directory."""
        found = checkpoints_in(self.directory / "checkpoints")
        return found[-1][1] if found else None


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration from a TOML file or a mapping, with `section.key=value` overrides."""
    if isinstance(source, Mapping):
        data, name = dict(source), "the configuration"
    else:
        data, name = load_toml(source), str(source)
    return validate(RunConfig, apply_overrides(data, overrides), name)


def prepare(
    config: RunConfig,
    *,
    prompts: Any = None,
    reward: Any = None,
    environment: Any = None,
    eval_prompts: Any = None,
) -> Plan:
    """Check all that can be checked before anything is started or written."""
    require(USER, "engine", "train")
    model = find_model(config.model.path)
    out = Path(config.run.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    _check_text("model.path", model)
    _check_text("run.out", out)
    config = _with_dtype(config)
    task = Task.open(
        config.task,
        model_directory=model,
        seed=config.run.seed,
        prompts=prompts,
        reward=reward,
        environment=environment,
        eval_prompts=eval_prompts,
    )
    return Plan(config, model, task, out)


def _check_text(key: str, path: Path) -> None:
    """Workers are told paths as text, and config.toml holds them so."""
    name = str(path.absolute())
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "backslashreplace").decode()
        raise UserError(
            f"{key} must be a path in UTF-8: `{shown}`. Use another directory, or a locale with "
            "UTF-8, such as LC_ALL=C.UTF-8."
        ) from None


def _with_dtype(config: RunConfig) -> RunConfig:
    """`auto` is measured once, before the run: a step taken again must come out the same."""
    if config.train.dtype != "auto":
        return config
    bf16 = in_child(["bf16-training"])["bf16-training"].in_force
    dtype = Dtype.BFLOAT16 if bf16 else Dtype.FLOAT32
    return config.model_copy(update={"train": config.train.model_copy(update={"dtype": dtype})})


def resume(
    run: str | Path,
    *,
    prompts: Any = None,
    reward: Any = None,
    accept_changed: Collection[str] = (),
    secrets: Sequence[str] = (),
    **more: Any,
) -> Plan:
    """The plan of a run that was stopped or killed.

    Objects that it was started with are given again, and so are secrets of its configuration, as
    overrides, since they are not written down; what changed since can be accepted by name.
    """
    run = Path(run)
    if not (run / CONFIG).is_file():
        raise UserError(f"not a run: `{run}`. Give the directory of a run.")
    _check_text("the run directory", run)
    if not (run / LEDGER).is_file():
        raise UserError(
            f"nothing to resume in `{run}`: {LEDGER} is missing. "
            "It did not train, or an older dora-rl wrote it: start a new run."
        )
    with Ledger.read(run / LEDGER) as ledger:
        facts = ledger.facts
    if "ended" in facts:
        raise UserError(f"nothing to resume in `{run}`: {facts['ended']}. Start a new run.")
    with _named(run / CONFIG):
        config = _config_of(run, secrets)
        plan = prepare(config, prompts=prompts, reward=reward, **more)
    now = identity(config, plan.task, plan.model)
    given = config.model_dump(mode="json", exclude_unset=True)
    check_same(run, facts, now, given, accept_changed)
    return replace(plan, out=run, resumed=True)


@contextmanager
def _named(config: Path) -> Iterator[None]:
    """Whoever resumes a run named no configuration: errors say which one was read."""
    try:
        yield
    except UserError as error:
        if str(config) in str(error):
            raise
        raise UserError(f"{error} The run's configuration is `{config}`.") from error


def _config_of(run: Path, secrets: Sequence[str]) -> RunConfig:
    hidden = hidden_keys(load_toml(run / CONFIG))
    given = {override.partition("=")[0].strip() for override in secrets}
    other = sorted(given.difference(hidden))
    if other:
        raise UserError(
            f"--resume takes no --set of `{other[0]}`: `{run}` goes on as it was configured. "
            "Leave it out."
        )
    missing = [key for key in hidden if key not in given]
    if missing:
        raise UserError(
            f"`{run / CONFIG}` does not hold the secrets of the run. Give again: "
            + " ".join(f"--set {key}=…" for key in missing)
        )
    return read_config(run / CONFIG, secrets)


def find_model(path: str) -> Path:
    """A model directory, or that of a packaged model by its name."""
    if path == "quickstart":
        from dora_rl.quickstart import model_directory

        return model_directory()
    from dora_rl.models.packaged import find

    return find(path)


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
    if plan.config.runtime.kind == "local":
        memory = Watch(plan.config.runtime.min_free_memory_mb)
        memory.check(plan.out / CONFIG if plan.resumed else None)
    while True:
        begin = time.perf_counter()
        with (
            _full_disk_named(plan.out),
            Session(
                plan,
                watch,
                watch_evaluations=watch_evaluations,
                listeners=listeners,
                warmup_steps=warmup_steps,
            ) as session,
        ):
            runtime = _runtime(session)
            ending = Ending(False, "the run failed")
            try:
                with _interruptible(runtime.stop, stopping):
                    ending = runtime.run()
            except BaseException as error:
                ending = Ending(False, f"{type(error).__name__}: {error}")
                if isinstance(error, RunFailed) and session.orchestrator.state.trainer.step == 0:
                    raise RunFailed(f"{str(error).rstrip('.')}. {_SEE_DOCTOR}") from error
                raise
            finally:
                summary, audit = session.close(ending, time.perf_counter() - begin)
        if not ending.paused:
            break
        plan = replace(plan, resumed=True)
    records = read_records(plan.out / METRICS_OF_STEPS)
    steps = tuple(record for record in records if isinstance(record, StepRecord))
    evaluations = tuple(record for record in records if isinstance(record, EvalRecord))
    return Run(plan.out, ending, steps, evaluations, summary, audit)


def _runtime(session: Session) -> Runtime:
    """What carries the run; the driver of a local one needs no torch."""
    if session.config.runtime.kind == "inline":
        from dora_rl.runtime.inline import InlineRuntime

        return InlineRuntime(session)
    from dora_rl.runtime.local.runtime import LocalRuntime

    return LocalRuntime(session)


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
    **options: Any,
) -> Run:
    """Train a language model with multi-version streaming rollout.

    `model` is a Hugging Face directory or a packaged model's name; `prompts` a list, a dataset,
    a generator function, or a JSONL file's path; `reward` a function of the response and the
    example. Anything else of the configuration goes into `config` or, by section, into
    `options`: `train(…, rollout={"slots": 64}, orchestration={"group_size": 4})`.
    """
    data: dict[str, Any] = {}
    if config is not None:
        data = load_toml(config) if not isinstance(config, Mapping) else _copy(config)
    for section, values in options.items():
        if not isinstance(values, Mapping):
            raise UserError(
                f"{section} must be a section with its keys: `{values!r}`. "
                f"Write {section}={{'key': value}}."
            )
        data[section] = {**data.get(section, {}), **values}
    _put(data, "model", "path", str(model))
    _put(data, "orchestration", "max_staleness", max_staleness)
    _put(data, "run", "steps", steps)
    _put(data, "run", "out", None if out is None else str(out))
    if isinstance(prompts, str | Path):
        _put(data, "task", "prompts", str(prompts))
        prompts = None
    plan = prepare(
        read_config(data),
        prompts=prompts,
        reward=reward,
        environment=environment,
        eval_prompts=eval_prompts,
    )
    return execute(plan, watch=watch)


def _put(data: dict[str, Any], section: str, key: str, value: Any) -> None:
    if value is not None:
        data[section] = {**data.get(section, {}), key: value}


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        section: dict(values) if isinstance(values, Mapping) else values
        for section, values in config.items()
    }


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
