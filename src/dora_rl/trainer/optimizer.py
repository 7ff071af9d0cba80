"""AdamW with warm-up, schedule and clipping; its state by the names of the parameters."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dora_rl.trainer.errors import CheckpointError, TrainerError
from dora_rl.trainer.settings import Schedule, TrainSettings
from dora_rl.trainer.sharding import full, local, shard_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(train: TrainSettings, step: int, total_steps: int) -> float:
    """The rate of a train step, which all its updates share; steps count from 0."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule is Schedule.CONSTANT:
        return train.learning_rate
    span = max(total_steps - train.warmup_steps, 1)
    left = max(0.0, 1 - (step - train.warmup_steps) / span)
    if train.schedule is Schedule.LINEAR:
        return train.learning_rate * left
    return train.learning_rate * 0.5 * (1 - math.cos(math.pi * left))


class Optimizer:
    """AdamW on the parameters of a policy; `total` sums a number over all processes."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        train: TrainSettings,
        total_steps: int,
        total: Callable[[Tensor], Tensor],
    ) -> None:
        if train.schedule is not Schedule.CONSTANT and total_steps < 1:
            raise TrainerError(
                f"schedule `{train.schedule}` needs a last step: `{total_steps}`. "
                "Set the number of steps, or use schedule `constant`."
            )
        self.count = 0  # updates taken
        self._parameters = dict(parameters)
        self._train = train
        self._total_steps = total_steps
        self._total = total
        decayed = [p for p in self._parameters.values() if p.dim() > 1]
        plain = [p for p in self._parameters.values() if p.dim() <= 1]
        groups = [(decayed, train.weight_decay), (plain, 0.0)]
        self._adam = torch.optim.AdamW(
            [{"params": members, "weight_decay": decay} for members, decay in groups if members],
            lr=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            fused=True,
        )

    def clear(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def grad_norm(self) -> float:
        """The global norm of the gradients, before clipping."""
        grads = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        return float(self._total(norm.square()).sqrt())

    def update(self, step: int, grad_norm: float) -> None:
        """One update with the gradients that are there, clipped; then they are gone."""
        if grad_norm > self._train.max_grad_norm:
            scale = self._train.max_grad_norm / grad_norm
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(scale)
        rate = learning_rate(self._train, step, self._total_steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.count += 1
        self.clear()

    def state(self) -> dict[str, Tensor]:
        """All moments, whole, by parameter; every process of the group must ask."""
        return {name: full(moment) for name, moment in self.moments()}

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """The moments themselves, of which this process may have a part."""
        for name, parameter in self._parameters.items():
            if self._adam.state.get(parameter):
                for moment in _MOMENTS:
                    yield f"{moment}.{name}", self._adam.state[parameter][moment]

    def load(self, state: Mapping[str, Tensor], count: int) -> None:
        """Continue from what `state` returned; refuses what does not fit, changing nothing."""
        self.prepare(state, count)()

    def prepare(self, state: Mapping[str, Tensor], count: int) -> Callable[[], None]:
        """Check and copy what `state` returned; the result makes it the optimizer's own."""
        loaded: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            if not any(f"{moment}.{name}" in state for moment in _MOMENTS):
                continue
            entry = {"step": torch.tensor(float(count), device=parameter.device)}
            for moment in _MOMENTS:
                value = state.get(f"{moment}.{name}")
                if value is None or value.shape != parameter.shape:
                    raise CheckpointError(
                        f"the optimizer's `{moment}.{name}` is missing or has another shape than "
                        f"`{list(parameter.shape)}`. Restore an earlier checkpoint."
                    )
                entry[moment] = torch.zeros_like(parameter, requires_grad=False)
                local(entry[moment]).copy_(shard_of(value, parameter))
            loaded[parameter] = entry

        def accept() -> None:
            self.clear()
            self._adam.state.clear()
            self._adam.state.update(loaded)
            self.count = count

        return accept

    def snapshot(self) -> Callable[[], None]:
        """A function that brings weights and moments back to what they are now."""
        count = self.count
        weights = [local(p).clone() for p in self._parameters.values()]
        states = [
            {key: local(value).clone() for key, value in self._adam.state.get(p, {}).items()}
            for p in self._parameters.values()
        ]

        @torch.no_grad()
        def restore() -> None:
            self.count = count
            for parameter, weight, state in zip(
                self._parameters.values(), weights, states, strict=True
            ):
                local(parameter).copy_(weight)
                if not state:
                    self._adam.state.pop(parameter, None)
                for key, value in state.items():
                    local(self._adam.state[parameter][key]).copy_(value)

        return restore
