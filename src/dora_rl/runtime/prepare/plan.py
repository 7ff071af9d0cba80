"""What is to be run: a plan from a configuration and objects, or from a run that is resumed.

Everything is checked here, and nothing is written or started.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.config import apply_overrides, load_toml, validate
from dora_rl.config.redaction import hidden_keys
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.registry import EngineName, check_interpreter
from dora_rl.extras import require
from dora_rl.machine.fast_paths import portable
from dora_rl.machine.trials import in_child
from dora_rl.models.config import read_config as read_model
from dora_rl.models.native.library import why_unavailable
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launchers.ray.installation import check_installed, on_cluster
from dora_rl.runtime.prepare import config_file
from dora_rl.runtime.prepare.devices import check_device
from dora_rl.runtime.prepare.given import check_given, names_of
from dora_rl.runtime.prepare.model_source import find_model
from dora_rl.runtime.records.identity import check_same, identity
from dora_rl.runtime.records.total_steps import ENDED, steps_trained, with_total
from dora_rl.runtime.workers.engines import why_too_long
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import CONFIG, LEDGER
from dora_rl.tasks.task import Task
from dora_rl.trainer.settings import CPU, Dtype

USER = "dora-rl train"
_ANY_GPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: checked, and nothing written yet."""

    config: RunConfig
    model: Path
    task: Task
    out: Path
    resumed: bool = False
    steps_trained: int = 0
    """Of a resumed run, when it is resumed."""
    first_steps: int | None = None
    """The steps that a resumed run was started for, and its journal begins with."""
    given: tuple[str, ...] = ()
    """Objects of the task that were given from Python, and are in no file."""


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration from a TOML file or a mapping, with `section.key=value` overrides."""
    if isinstance(source, Mapping):
        data, name = dict(source), "the configuration"
    else:
        data, name = config_file.load(source), str(source)
    return validate(RunConfig, apply_overrides(data, overrides), name)


def prepare(
    config: RunConfig,
    *,
    out: Path | None = None,
    prompts: Any = None,
    reward: Any = None,
    environment: Any = None,
    eval_prompts: Any = None,
) -> Plan:
    """Check all that can be checked before anything is started or written.

    `out` is where the run is, if it is not to be where the configuration says.
    """
    require(USER, "engine", "train")
    if config.model.lora is not None:
        require("model.lora", "lora")
    if config.runtime.kind == "ray":
        check_installed()
    model = find_model(config.model.path)
    out = out or Path(config.run.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    _check_text("model.path", model)
    _check_text("run.out", out)
    # The GPUs of a cluster are not this machine's: the trainer tells what its node lacks.
    check_device(config.train, (lambda: _ANY_GPUS) if on_cluster(config.runtime) else None)
    check_interpreter(config.rollout.engine, config.rollout.engine_options, config.rollout.device)
    config = _with_kernels(_with_dtype(config))
    task = Task.open(
        config.task,
        model_directory=model,
        seed=config.run.seed,
        prompts=prompts,
        reward=reward,
        environment=environment,
        eval_prompts=eval_prompts,
        hidden=(out,),
        why_too_long=why_too_long(config, read_model(model)),
    )
    given = names_of(
        prompts=prompts, reward=reward, environment=environment, eval_prompts=eval_prompts
    )
    return Plan(config, model, task, out, given=given)


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
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.train.device == CPU else {}
    bf16 = in_child(["bf16-training"], hidden)["bf16-training"].in_force
    dtype = Dtype.BFLOAT16 if bf16 else Dtype.FLOAT32
    return config.model_copy(update={"train": config.train.model_copy(update={"dtype": dtype})})


def _with_kernels(config: RunConfig) -> RunConfig:
    """What bits depend on is settled before the run, and stays as it is when it is resumed."""
    if not config.deterministic:
        return config
    settled = {"train": _settled("train", config.train)}
    if config.rollout.engine is EngineName.EMBEDDED:
        settled["rollout"] = _settled("rollout", config.rollout)
    return config.model_copy(update=settled)


def _settled(name: str, section: Any) -> Any:
    if section.native_kernels is None:
        native = not portable() and why_unavailable() is None
        return section.model_copy(update={"native_kernels": native})
    if section.native_kernels and (reason := why_unavailable()):
        raise UserError(
            f"{name}.native_kernels cannot be `true` on this machine: {reason}. Set it to false."
        )
    return section


def _without_kernels(config: RunConfig) -> RunConfig:
    """A run that does not name them is of a time when there were none."""
    if not config.deterministic:
        return config
    sections: dict[str, Any] = {"rollout": config.rollout, "train": config.train}
    older = {
        name: section.model_copy(update={"native_kernels": False})
        for name, section in sections.items()
        if section.native_kernels is None
    }
    return config.model_copy(update=older)


def plan_resume(
    run: str | Path,
    *,
    prompts: Any = None,
    reward: Any = None,
    steps: int | None = None,
    accept_changed: Collection[str] = (),
    secrets: Sequence[str] = (),
    **more: Any,
) -> Plan:
    """The plan of a run that was stopped or killed, for `execute`; `dora_rl.resume` does both.

    Objects that it was started with are given again, and so are secrets of its configuration, as
    overrides, since they are not written down; what changed since can be accepted by name. With
    `steps`, a new total, it takes more steps than it was started for, also if it has ended.
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
        facts, trained = ledger.facts, steps_trained(ledger)
    with _named(run / CONFIG):
        config = _config_of(run, secrets)
    first_steps = facts["config"]["run"]["steps"]
    config = with_total(
        run, config, steps, first=first_steps, trained=trained, ended=facts.get(ENDED)
    )
    objects = {"prompts": prompts, "reward": reward, **more}
    check_given(run, facts, config, objects)
    with _named(run / CONFIG):
        plan = prepare(_without_kernels(config), out=run, **objects)
    now = identity(config, plan.task, plan.model)
    given = config.model_dump(mode="json", exclude_unset=True)
    check_same(run, facts, now, given, accept_changed)
    return replace(plan, resumed=True, steps_trained=trained, first_steps=first_steps)


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
            f"--resume takes no --set of `{other[0]}`: `{run}` continues as it was configured. "
            "Leave it out."
        )
    missing = [key for key in hidden if key not in given]
    if missing:
        raise UserError(
            f"`{run / CONFIG}` does not hold the secrets of the run. Give again: "
            + " ".join(f"--set {key}=…" for key in missing)
        )
    # As it is: what it names was found when the run was started.
    return validate(RunConfig, apply_overrides(load_toml(run / CONFIG), secrets), run / CONFIG)
