"""What is tried before a run starts, so that a mistake is told before a file is written.

The order is that of the time it takes: the directory, memory, the weights' headers, then the
workers with one response. Free of torch.
"""

from dataclasses import dataclass

from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.fit import check_dtypes, check_shapes
from dora_rl.engines.registry import own_interpreter
from dora_rl.models.config import ModelConfig, read_config
from dora_rl.runtime.control.memory import Watch
from dora_rl.runtime.launchers.ray.installation import address_of, on_cluster, prepare_import
from dora_rl.runtime.prepare import memory_estimate
from dora_rl.runtime.prepare.memory_estimate import Footprint
from dora_rl.runtime.prepare.plan import Plan
from dora_rl.store.rundir import CONFIG, check_free
from dora_rl.tasks.dry_run import Tried, try_task
from dora_rl.trainer.settings import LoraSettings
from dora_rl.weights.huggingface import stored_tensors

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found: the model, what it needs, and the first prompt with its reward."""

    model: ModelConfig
    footprint: Footprint
    tried: Tried


def preflight(plan: Plan) -> Preflight:
    """Check all that takes no model; nothing is written."""
    if not plan.resumed:
        check_free(plan.out)
    check_memory(plan)
    model = read_config(plan.model)
    needed = _check_footprint(plan, model)
    _check_weights(plan, model)
    _check_cluster(plan)
    # What is resumed has been scored: a reward that is away for a while fails a trajectory, not it.
    dry_run = plan.config.task.dry_run and not plan.resumed
    return Preflight(model, needed, try_task(plan.task, dry_run=dry_run))


def check_memory(plan: Plan) -> None:
    """Refuse a run that would be stopped at once, for memory is short already."""
    if plan.config.runtime.kind != "inline":
        watch = Watch(plan.config.runtime.min_free_memory_mb)
        watch.check(plan.out / CONFIG if plan.resumed else None)


def _check_footprint(plan: Plan, model: ModelConfig) -> Footprint:
    """The run fits into this machine, unless its workers are on others."""
    if on_cluster(plan.config.runtime):
        return memory_estimate.footprint(plan.config, model)
    return memory_estimate.check(plan.config, model)


def _check_cluster(plan: Plan) -> None:
    """A Ray cluster that is named answers, and has what the run asks for, on every node."""
    if plan.config.runtime.kind == "ray":
        prepare_import(address_of(plan.config.runtime.ray.address))
        from dora_rl.runtime.launchers.ray.cluster import check_cluster

        if plan.config.runtime.ray.rewards.number:
            from dora_rl.runtime.launchers.ray.rewards import order_of

            order_of(plan.task, {})
        rollout = plan.config.rollout
        own = own_interpreter(rollout.engine, rollout.engine_options, rollout.device)
        paths = [plan.model, *([plan.out] if plan.resumed else [])]
        paths += [own.python] if own is not None else []
        check_cluster(plan.config, [str(path.absolute()) for path in paths])


def _check_weights(plan: Plan, model: ModelConfig) -> None:
    """All tensors of the model are there, and can be published as the engine takes them."""
    stored = stored_tensors(plan.model)
    check_shapes(model, plan.model, {name: at.shape for name, at in stored.items()})
    lora = plan.config.model.lora
    if lora is not None:
        _check_targets(lora, model)
    publish = plan.config.train.publish_dtype
    if publish is None or lora is not None:
        found = {_DTYPES[stored[name].dtype] for name in model.tensors()}
        fix = "Save the base in one of them." if lora else "Set train.publish_dtype."
        check_dtypes(plan.model, found, f" {fix}")


def _check_targets(lora: LoraSettings, model: ModelConfig) -> None:
    """The modules that are to have an adapter are there."""
    known = {name.rpartition(".")[2] for name in model.linears()}
    for target in lora.target_modules:
        if target not in known:
            raise UserError(
                f"model.lora.target_modules names no linear layer of the model: `{target}`. Its "
                f"layers have {', '.join(sorted(known))}."
            )
