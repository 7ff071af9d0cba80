"""The learning rate, clipping, and going back."""

import pytest
import torch
from torch import nn

from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.optimizer import Optimizer, learning_rate
from dora_rl.trainer.settings import TrainSettings


def rates(steps: int, **train: object) -> list[float]:
    settings = TrainSettings.model_validate({"learning_rate": 1.0, **train})
    return [learning_rate(settings, step, steps) for step in range(steps + 1)]


def test_the_schedules() -> None:
    assert rates(4) == [1.0] * 5
    assert rates(4, warmup_steps=2)[:3] == [0.5, 1.0, 1.0]
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(4, schedule="cosine") == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6
    )


def make(**train: object) -> tuple[dict[str, nn.Parameter], Optimizer]:
    source = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "norm": (4,)}
    parameters = {n: nn.Parameter(torch.randn(s, generator=source)) for n, s in shapes.items()}
    settings = TrainSettings.model_validate({"learning_rate": 0.1, **train})
    return parameters, Optimizer(parameters, settings, 10, lambda number: number)


def give(parameters: dict[str, nn.Parameter], value: float) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, value)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    parameters, optimizer = make(max_grad_norm=0.5)
    give(parameters, 1.0)
    norm = optimizer.grad_norm()
    assert norm == pytest.approx(4.0)
    optimizer.update(0, norm)
    # The first moment is a tenth of the clipped gradient: 1 * 0.5 / 4.
    moments = optimizer.state()
    torch.testing.assert_close(moments["exp_avg.norm"], torch.full((4,), 0.0125))
    assert all(parameter.grad is None for parameter in parameters.values())


def test_only_matrices_decay() -> None:
    parameters, optimizer = make(weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    give(parameters, 0.0)
    optimizer.update(0, 0.0)
    torch.testing.assert_close(parameters["norm"].detach(), before["norm"])
    torch.testing.assert_close(parameters["matrix"].detach(), before["matrix"] * 0.95)


@pytest.mark.parametrize("updates", [0, 2])
def test_a_snapshot_brings_everything_back(updates: int) -> None:
    parameters, optimizer = make()
    for value in range(updates):
        give(parameters, float(value))
        optimizer.update(0, 1.0)
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    state = {name: t.clone() for name, t in optimizer.state().items()}
    undo = optimizer.snapshot()
    results = []
    for _ in range(2):
        give(parameters, 3.0)
        optimizer.update(0, 1.0)
        give(parameters, -1.0)
        optimizer.update(0, 1.0)
        results.append(torch.cat([p.detach().flatten() for p in parameters.values()]))
        undo()
        assert optimizer.count == updates
        assert all(torch.equal(weights[n], p.detach()) for n, p in parameters.items())
        assert state.keys() == optimizer.state().keys()
        assert all(torch.equal(state[n], t) for n, t in optimizer.state().items())
    # Also what cannot be seen, such as Adam's count, is back: the same updates give the same.
    assert torch.equal(*results)


def test_state_goes_on_in_another_optimizer() -> None:
    parameters, optimizer = make()
    give(parameters, 1.0)
    optimizer.update(0, 1.0)
    others, other = make()
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(parameters[name])
    other.load(optimizer.state(), optimizer.count)
    for each, its in ((parameters, optimizer), (others, other)):
        give(each, -2.0)
        its.update(1, 1.0)
    assert all(torch.equal(p, others[n]) for n, p in parameters.items())


def test_a_schedule_needs_an_end() -> None:
    settings = TrainSettings.model_validate({"schedule": "cosine"})
    with pytest.raises(TrainerError, match="schedule `cosine` needs a last step: `0`"):
        Optimizer({"x": nn.Parameter(torch.zeros(2))}, settings, 0, lambda number: number)
