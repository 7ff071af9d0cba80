"""How a version comes into vLLM, and the proof that it is what serves.

    full       one set of weights, streamed through vLLM's own reload: what comes replaces the other
    adapters   LoRA adapters of one base, as many as there are slots, each with an id of its own

Either way a version serves only after two proofs. Which weights they are: those that were compared
with their digests are streamed into vLLM, which must take all of them; an adapter vLLM reads by
itself, so what it then has in memory is compared with them. That they are in their places: what
vLLM says of a fixed text is, but for rounding, what the trainer recorded when it published them.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dora_rl.core.protocol.types import Version
from dora_rl.engines.errors import VersionRefused
from dora_rl.engines.fit import check_adapter, check_base, check_tensors
from dora_rl.engines.vllm.backend import Backend, LoadedAdapter
from dora_rl.models.config import ModelConfig
from dora_rl.weights.adapter import module_of, tensor_names
from dora_rl.weights.fingerprint import Fingerprint, probe
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.loading import LoadedWeights
from dora_rl.weights.tensors import weights_digest

# How far a log-probability of the fingerprint may be off: what rounding explains, with room, in the
# coarsest dtype on the way from the trainer's products to vLLM's. In float32, 32 tokens of small
# models were off by 2e-5 at most; of bfloat16, docs/engine.md has 0.15.
TOLERANCES = {"float32": 0.02, "float16": 0.25, "bfloat16": 1.0}
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as manifests have them
_PLACES = (4, 8, 12, 16, 20, 24, 28, 31)  # in a probe: one step of vLLM for each


class Versions(Protocol):
    """The weights of the live versions, in vLLM."""

    @property
    def lora(self) -> bool: ...

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        """Refuse what is no version of this engine's model."""

    def load(self, version: Version, directory: Path, weights: LoadedWeights) -> None:
        """Bring it in and prove it; if that fails, it is not there, and `VersionRefused` raised."""

    def drop(self, version: Version) -> None:
        """Unknown: does nothing."""

    def adapter(self, version: Version) -> LoadedAdapter | None:
        """What the requests of a version must name, if anything."""


class FullVersion:
    """One version at a time; vLLM is started without weights."""

    lora = False

    def __init__(self, backend: Backend, config: ModelConfig, dtype: str) -> None:
        self._backend = backend
        self._config = config
        self._dtype = dtype

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        check_adapter(self._config, None, directory, weights)
        check_tensors(self._config, directory, weights.tensors)
        _check_probe(self._config, directory, weights)

    def load(self, version: Version, directory: Path, weights: LoadedWeights) -> None:
        try:
            self._stream(version, weights)
            tokens = _fingerprint(weights).tokens
            _check_fingerprint(version, weights, self._dtype, self._backend.prompt_logprobs(tokens))
        except VersionRefused:
            self._backend.restart()
            raise
        except Exception as error:  # whatever vLLM's loader meets
            self._backend.restart()
            raise _not_loaded(version, directory, error) from error

    def _stream(self, version: Version, weights: LoadedWeights) -> None:
        """The weights that were checked, into vLLM."""
        streamed: set[str] = set()

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.tensors.items():
                yield name, tensor
                streamed.add(name)

        self._backend.reload(stream())
        if missing := sorted(weights.tensors.keys() - streamed):
            raise VersionRefused(
                f"vLLM did not take tensor `{missing[0]}` of version {version}, and "
                f"{len(missing) - 1} others. It is not here."
            )

    def drop(self, version: Version) -> None:
        pass  # replaced by what comes

    def adapter(self, version: Version) -> None:
        return None


class AdapterVersions:
    """Adapters of the weights that vLLM was started with."""

    lora = True

    def __init__(self, backend: Backend, model: Path, config: ModelConfig, dtype: str) -> None:
        base = map_model(model)
        check_base(config, model, base)
        self._base = weights_digest(base)
        self._backend = backend
        self._config = config
        self._dtype = dtype
        # vLLM keeps what it has of an id, whatever the path: no version has that of another.
        self._ids = count(1)
        self._adapters: dict[Version, LoadedAdapter] = {}

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        check_adapter(self._config, self._base, directory, weights)
        _check_probe(self._config, directory, weights)

    def load(self, version: Version, directory: Path, weights: LoadedWeights) -> None:
        adapter = LoadedAdapter(next(self._ids), weights.digest, str(directory))
        try:
            self._backend.add_adapter(adapter)
            self._check_memory(version, weights, adapter)
        except VersionRefused:
            self._backend.remove_adapter(adapter)
            raise
        except Exception as error:  # whatever vLLM's loader meets: no step was taken yet
            self._backend.remove_adapter(adapter)
            raise _not_loaded(version, directory, error) from error
        # A step that fails here ends the worker, as any other: vLLM takes what was scheduled for
        # computed, and every request of it would go on with KV that is not there.
        tokens = _fingerprint(weights).tokens
        said = [self._backend.next_logprob(tokens[:at], tokens[at], adapter) for at in _PLACES]
        try:
            _check_fingerprint(version, weights, self._dtype, said, _PLACES)
        except VersionRefused:
            self._backend.remove_adapter(adapter)
            raise
        self._adapters[version] = adapter

    def _check_memory(
        self, version: Version, weights: LoadedWeights, adapter: LoadedAdapter
    ) -> None:
        """What vLLM read by itself, and has in memory, is bit for bit what was checked."""
        entry = weights.manifest.adapter
        assert entry is not None, "checked before"
        held = self._backend.adapter_tensors(adapter)
        expected = {module_of(name) for name in weights.tensors}
        wrong = sorted(str(module) for module in expected ^ held.keys())
        for module, (down, up) in held.items():
            if module in expected:
                ours = [weights.tensors[name] for name in tensor_names(module)]
                scaled = ours[1].to(up.dtype) * entry.scale
                if not (torch.equal(down, ours[0].to(down.dtype)) and torch.equal(up, scaled)):
                    wrong.append(module)
        if wrong:
            raise VersionRefused(
                f"vLLM does not have the adapter of version {version} in memory, but another one "
                f"for `{wrong[0]}`, and {len(wrong) - 1} other modules. It is not here."
            )

    def drop(self, version: Version) -> None:
        adapter = self._adapters.pop(version, None)
        if adapter is not None:
            self._backend.remove_adapter(adapter)

    def adapter(self, version: Version) -> LoadedAdapter:
        return self._adapters[version]


def _check_probe(config: ModelConfig, directory: Path, weights: LoadedWeights) -> None:
    fingerprint = weights.manifest.fingerprint
    if fingerprint is None or fingerprint.tokens != probe(config.vocab_size):
        raise VersionRefused(
            f"version {weights.manifest.version} in `{directory}` has no fingerprint of this "
            "model's probe, so that nothing could prove that vLLM serves it. Publish it with one, "
            "as the trainer does."
        )


def _fingerprint(weights: LoadedWeights) -> Fingerprint:
    fingerprint = weights.manifest.fingerprint
    assert fingerprint is not None, "checked before"
    return fingerprint


def _check_fingerprint(
    version: Version,
    weights: LoadedWeights,
    dtype: str,
    logprobs: Sequence[float],
    places: Sequence[int] | None = None,
) -> None:
    """Compare what vLLM says of the probe, or of some places in it, with what was recorded."""
    fingerprint = _fingerprint(weights)
    gap = fingerprint.distance(logprobs, places)
    stored = {DTYPES[entry.dtype] for entry in weights.manifest.tensors.values()}
    bound = max(TOLERANCES[name] for name in (dtype, fingerprint.dtype, *stored))
    if not gap <= bound:
        raise VersionRefused(
            f"vLLM does not compute with the weights of version {version}: a log-probability "
            f"of its fingerprint is off by `{gap:.3g}`, and {bound} would be rounding. It is not "
            "here."
        )


def _not_loaded(version: Version, directory: Path, error: Exception) -> VersionRefused:
    return VersionRefused(
        f"version {version} could not be loaded from `{directory}`: {type(error).__name__}: "
        f"{error}. It is not here."
    )
