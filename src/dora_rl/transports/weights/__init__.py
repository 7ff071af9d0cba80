"""Versions on their way from the trainer to the engines; what they are is in `dora_rl.weights`.

    trainer     publisher.publish(7, tensors)      whole in the store, then offered to receivers
    instance    path = receiver.receive(7)         whole on this machine
                engine.install(7, path)            maps the files, and checks every digest
                receiver.release(7)                the engine has let go of it

directory       every receiver maps the files of the store: `shared_directory`
                with deltas, it keeps copies and reads what changed: `delta_directory`
process_group   the trainer broadcasts to the receivers that ask: `process_group`
object_store    every receiver pulls from the object store of the cluster: `object_store`

The store of whole versions is always there: it is what a resume continues from, and what a step
loads that computes log-probabilities again. `registry` makes the ends that a configuration names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dora_rl.core.protocol.types import Version
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.manifest import Manifest

if TYPE_CHECKING:  # the driver knows these protocols, and does without torch
    import torch


@dataclass(slots=True)
class Traffic:
    """What a receiver was sent since it was made; each only grows."""

    sent_bytes: int = 0
    whole_bytes: int = 0
    """What the same versions take, each sent whole."""
    deltas: int = 0
    wholes: int = 0
    fallbacks: int = 0
    """Of the wholes, those that came another way than by the transport."""

    def count(self, manifest: Manifest, changes_bytes: int | None = None) -> None:
        """A version arrived with its manifest: by deltas of so many bytes, or whole."""
        about = len(manifest.encode())
        self.whole_bytes += about + manifest.num_bytes
        self.sent_bytes += about + (manifest.num_bytes if changes_bytes is None else changes_bytes)
        self.wholes += changes_bytes is None
        self.deltas += changes_bytes is not None

    @property
    def share(self) -> float | None:
        """Sent over whole; None if there was nothing to send."""
        return self.sent_bytes / self.whole_bytes if self.whole_bytes else None


class WeightPublisher(Protocol):
    """The trainer's end."""

    @property
    def root(self) -> Path:
        """The store of whole versions."""

    def publish(
        self,
        version: Version,
        tensors: "Mapping[str, torch.Tensor]",
        *,
        fingerprint: Fingerprint | None = None,
        adapter: Adapter | None = None,
    ) -> Manifest:
        """From then on every receiver can receive it; a `WeightsError` if it is not published.

        The same weights again change nothing.
        """

    def close(self) -> None:
        """What is published stays in the store; nobody is sent anything any more."""


class WeightReceiver(Protocol):
    """An instance's end. Not thread-safe."""

    @property
    def traffic(self) -> Traffic: ...

    def receive(self, version: Version) -> Path:
        """A directory of this machine with the whole version, for `weights.loading.open_version`.

        A `WeightsError` in bounded time if it is not published, is gone, or does not arrive. A copy
        was compared with its digests; the files of the store are as the engine opens them.
        """

    def release(self, version: Version) -> None:
        """The engine does not read that directory any more. Unknown: does nothing."""

    def close(self) -> None:
        """Copies are deleted; it must not be used again."""
