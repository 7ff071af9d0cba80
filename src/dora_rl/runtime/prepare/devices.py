"""Whether the trainer's GPUs and address can be had. Free of torch: a child process asks it."""

from collections.abc import Callable

from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.trials import python
from dora_rl.trainer.rendezvous import address_of, token_for
from dora_rl.trainer.settings import AUTO, CPU, TrainSettings, refusal


def count_gpus() -> int:
    """How many GPUs torch has on this machine."""
    said, failure = python("-m", "dora_rl.trainer.devices")
    if failure:
        raise UserError(
            f"torch cannot tell which GPUs are there: `{failure}`. "
            'Set train.device = "cpu", or repair the installation of torch.'
        )
    return int(said)


def check_device(train: TrainSettings, count: Callable[[], int] | None = None) -> None:
    """Refuse a `train.device` that this machine does not have, with the value and the fix.

    So is a `train.rendezvous` that other machines can reach, without a token.

    Nothing is asked of torch where the answer cannot matter: for the CPU, and for one process
    with `auto`, which takes what it finds.
    """
    address = address_of(train.rendezvous)
    if train.processes > 1:
        token_for(address)
    if train.device == CPU or (train.device == AUTO and train.processes == 1):
        return
    why = refusal(train.device, train.processes if address.loopback else 1, (count or count_gpus)())
    if why is not None:
        raise UserError(why)
