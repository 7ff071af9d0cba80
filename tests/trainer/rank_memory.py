"""One rank of a training group that measures itself: `python -m tests.trainer.rank_memory`.

Arguments: the settings as JSON, the rendezvous, rank, size. Prints, as JSON, by how many bytes its
memory rose at the peak of loading and of publishing. Pages of files do not count: the system takes
them back when it needs them.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from dora_rl.trainer.replica import Replica, ReplicaSettings
from dora_rl.trainer.world import join, leave


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Peak:
    """Memory above what it was when this began, without pages of files."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        self._before, self._files = _status("VmRSS"), _status("RssFile")

    def rise(self) -> int:
        return _status("VmHWM") - self._before - max(0, _status("RssFile") - self._files)


def main(settings: str, rendezvous: str, rank: str, size: str) -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401  # so that it does not count

    store = dist.FileStore(rendezvous, int(size))
    world = join(store, int(rank), int(size), torch.device("cpu"))
    world.total(torch.ones(1))  # the group's own threads and buffers
    found = {}
    peak = Peak()
    replica = Replica(msgspec.json.decode(settings, type=ReplicaSettings), world)
    found["load"] = peak.rise()
    peak = Peak()
    published = replica.published()
    found["publish"] = peak.rise()
    found["published"] = sum(tensor.nbytes for tensor in published.values())
    leave(world)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
