"""Which device the trainer computes on: `train.device` becomes a `torch.device`, or is refused.

`python -m dora_rl.trainer.devices` prints how many GPUs torch has here, for a process that does
not import torch itself.
"""

import torch

from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.settings import AUTO, CPU, refusal


def gpus() -> int:
    """How many GPUs torch can use in this process; 0 with a build for CPUs."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve(name: str, *, local_rank: int = 0, local_processes: int = 1) -> torch.device:
    """The device of one training process.

    `name` is a valid `train.device`; `local_rank` counts the `local_processes` training processes
    of this machine, of which each gets a GPU of its own. Raises `TrainerError` if a GPU is not
    there; `auto` without any GPU is the CPU.
    """
    count = gpus() if name != CPU else 0
    why = refusal(name, local_processes, count)
    if why is not None:
        raise TrainerError(why)
    if name == CPU or (name == AUTO and count == 0):
        return torch.device("cpu")
    _, _, number = name.partition(":")
    return torch.device("cuda", int(number) if number else local_rank)


if __name__ == "__main__":
    print(gpus())
