"""The policy: any causal language model of transformers, with its head applied in chunks.

Master weights are float32. Parameters go by the names that the model's own checkpoint has, those
of an adapter by PEFT's, and a tied one appears once, so that what is published is what an engine
expects.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dora_rl import extras
from dora_rl.machine.fast_paths import portable
from dora_rl.models import cpu
from dora_rl.models.errors import ModelError
from dora_rl.trainer.logprobs import token_logprobs
from dora_rl.trainer.lora import dropouts, initial, inject, plain, saved_name
from dora_rl.trainer.native import layers
from dora_rl.trainer.native.operations import Packing
from dora_rl.trainer.settings import Dtype, LoraSettings, TrainSettings
from dora_rl.trainer.sharding import local, shard_of
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.fingerprint import Fingerprint, probe
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import weights_digest

VALUE_HEAD = "value_head."
_VARLEN = "flash_attention_2"
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)
_HEAD_TOLERANCE = 1e-3  # of logits of size 1: float32 twice in another order


class Policy(nn.Module):
    """Log-probabilities of response tokens, and their values where the algorithm wants them.

    One `forward` does it all, so that a sharded model gathers its weights once.
    """

    def __init__(self, model: nn.Module, train: TrainSettings, temperature: float) -> None:
        super().__init__()
        self.model: Any = model
        self.value_head: nn.Linear | None = None
        self._temperature = temperature
        self._chunk = train.logprob_chunk
        assert train.dtype != "auto", "whoever plans the run chooses"
        self._bf16 = train.dtype is Dtype.BFLOAT16
        config = getattr(model, "config", None)
        self.packs = getattr(config, "_attn_implementation", None) == _VARLEN
        """Whether its attention takes sequences of any length in one row, without padding."""
        self.native = False
        """Whether its layers take rows with a `Packing`: see `native.layers`."""
        self.dropouts = dropouts(model)
        """The dropout layers of an adapter: see `lora.dropping`."""

    def add_value_head(self) -> None:
        """Sets `value_head`, on the meta device: `load` gives it memory and values."""
        size = self.model.get_output_embeddings().weight.shape[1]
        self.value_head = nn.Linear(size, 1, device="meta")

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        input_BT: Tensor,
        positions_T: Tensor,
        targets_T: Tensor,
        sampled_T: Tensor | None,
        lengths: Sequence[int] | None = None,
        packing: Packing | None = None,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies (0 where nothing was sampled), and values.

        With `lengths` or a `packing`, the one row of `input_BT` holds several sequences. The
        temperature is the run's, unless another one is given.
        """
        hidden_TD = self._hidden(input_BT, lengths, packing).index_select(0, positions_T)
        if self._bf16:
            hidden_TD = hidden_TD.bfloat16()
        values_T = None
        if self.value_head is not None:
            values_T = self.value_head(hidden_TD.float()).sum(1)  # no view: FSDP hooks it
        if sampled_T is None:
            return *self._score(hidden_TD, targets_T, temperature), values_T
        logprobs, entropy = self._score(
            hidden_TD.index_select(0, sampled_T), targets_T.index_select(0, sampled_T), temperature
        )
        nothing_T = torch.zeros(len(targets_T), device=logprobs.device)
        logprobs_T = nothing_T.index_copy(0, sampled_T, logprobs)
        return logprobs_T, nothing_T.index_copy(0, sampled_T, entropy), values_T

    def _hidden(
        self, input_BT: Tensor, lengths: Sequence[int] | None, packing: Packing | None
    ) -> Tensor:
        """The last state of every token, one row after another."""
        base = self.model.base_model
        with torch.autocast(input_BT.device.type, torch.bfloat16, enabled=self._bf16):
            if packing is not None:
                dtype = torch.bfloat16 if self._bf16 else torch.float32
                return layers.hidden_states(base, input_BT[0], packing, dtype)
            apart = {} if lengths is None else _apart(lengths, input_BT.device)
            states: Tensor = base(input_ids=input_BT, use_cache=False, **apart).last_hidden_state
        return states.flatten(0, 1)

    def both_logits(self, input_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of one sequence as the model computes them, and as its head alone does.

        In float32 where its attention can; the latter with our kernels where they are used.
        """
        base, head = self.model.base_model, self.model.get_output_embeddings()
        with torch.autocast(input_BT.device.type, torch.bfloat16, enabled=self.packs):
            theirs = self.model(input_ids=input_BT, use_cache=False).logits
            if self.native:
                packing = Packing.of([(0, [input_BT.numel()])])
                hidden = layers.hidden_states(base, input_BT[0], packing, torch.float32)
            else:
                hidden = base(input_ids=input_BT, use_cache=False).last_hidden_state
            return theirs.float(), head(hidden).float().view_as(theirs)

    def fingerprint(self) -> Fingerprint | None:
        """What these weights say of the probe; None if that is no number.

        A sharded model needs all processes for it.
        """
        tokens = probe(self.vocab_size)
        row = torch.tensor([tokens], device=self.device)
        places = torch.arange(len(tokens) - 1, device=self.device)
        lengths = [len(tokens)] if self.packs else None
        packing = Packing.of([(0, lengths or [len(tokens)])]) if self.native else None
        with torch.no_grad():
            logprobs, _, _ = self(row, places, row[0, 1:], None, lengths, packing, temperature=1.0)
        if not logprobs.isfinite().all():
            return None
        dtype = "bfloat16" if self._bf16 else "float32"
        return Fingerprint(tokens, tuple(logprobs.clamp(max=0.0).tolist()), dtype)

    def _score(
        self, hidden_MD: Tensor, targets_M: Tensor, temperature: float | None
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden_MD,
            head.weight,
            targets_M,
            temperature=self._temperature if temperature is None else temperature,
            chunk=self._chunk,
            bias_V=getattr(head, "bias", None),
        )


def _apart(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What keeps the sequences of a packed row apart, in the words of transformers.

    Positions alone do for a mask; the varlen kernel is told the lengths, for it does not recognise
    sequences of one token.
    """
    sizes = torch.tensor(lengths, device=device)
    ends = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    begins = torch.repeat_interleave(ends[:-1], sizes)
    longest = max(lengths)
    return {
        "position_ids": (torch.arange(sum(lengths), device=device) - begins)[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attention(device: torch.device, train: TrainSettings, kind: type) -> str:
    """The attention of transformers that is used: a varlen kernel where there is one.

    That is FlashAttention 2, on CUDA and in bfloat16, for a `kind` of model that says that it
    supports it. Untested so far: no machine of ours has a GPU. `make test-gpu` compares it with
    the other one. `DORA_RL_PORTABLE=1` leaves it alone.
    """
    if device.type != "cuda" or train.dtype is not Dtype.BFLOAT16 or portable():
        return "sdpa"
    from transformers.utils.import_utils import is_flash_attn_2_available

    supported = getattr(kind, "_supports_flash_attn", False)
    return _VARLEN if supported and is_flash_attn_2_available() else "sdpa"


def _kind(config: Any) -> type:
    """The class that transformers make a model of this configuration with."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), object)
    kind: type = found[0] if isinstance(found, (list, tuple)) else found
    return kind


def import_family(directory: Path) -> None:
    """Import what `load` would for a model of this directory: seconds, the first time."""
    from transformers import AutoConfig

    _kind(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))


@dataclass(frozen=True)
class Source:
    """What training starts from: a model directory, whose files are mapped, and version 0."""

    directory: Path
    tensors: dict[str, Tensor]  # of version 0, by the names that versions are published with
    names: dict[str, str]  # of those, by the parameter of the policy that is trained
    base: dict[str, Tensor] = field(default_factory=dict)  # frozen, where versions are adapters
    lora: LoraSettings | None = None

    @cached_property
    def adapter(self) -> Adapter | None:
        """What versions are adapters of, if they are: the base is read once for it."""
        if self.lora is None:
            return None
        base = weights_digest(self.base)
        return Adapter(base, self.lora.rank, self.lora.alpha, self.lora.target_modules)

    @cached_property
    def digest(self) -> str:
        """Of all that training starts from, computed once: it reads all of it."""
        return weights_digest(self.tensors, adapter=self.adapter)


def load(
    directory: Path,
    train: TrainSettings,
    temperature: float,
    device: torch.device = _CPU,
    *,
    seed: int = 0,
    value_head: bool = False,
    lora: LoraSettings | None = None,
    shard: Callable[[Policy], None] = lambda policy: None,
) -> tuple[Policy, Source]:
    """The policy in float32 on `device`, and where it came from.

    It is described first, without memory (the meta device); `shard` may then give each process
    its part; memory is taken for that part alone, and only its rows are read from the files.
    What no file has (a value head, an adapter) is drawn from the seed. Safetensors only; no code
    of the model's.
    """
    directory = Path(directory)
    extras.require("dora-rl train", "engine", "train")
    cpu.guard()
    if not (directory / "config.json").is_file():
        raise ModelError(f"no config.json in `{directory}`. Give a Hugging Face model directory.")
    tensors = map_model(directory)
    model = _described(directory, train, device)
    if lora is not None:
        inject(model, lora)
    policy = Policy(model, train, temperature)
    policy.native = not policy.dropouts and layers.install(model, train.native_kernels, device)
    names = _names(policy, model, tensors, directory)
    weights = {name: tensors[saved] for name, saved in names.items()}
    source = Source(directory, tensors, names)
    if lora is not None:
        source = _adapter_source(policy, directory, tensors, lora, seed)
        weights |= {name: source.tensors[saved] for name, saved in source.names.items()}
    if value_head:
        policy.add_value_head()
        weights |= _value_head_weights(policy, seed)
    shard(policy)
    _materialise(policy, device, weights)
    _check_head(policy, directory)
    return policy, source


def _adapter_source(
    policy: Policy, directory: Path, base: dict[str, Tensor], lora: LoraSettings, seed: int
) -> Source:
    """Version 0 is the adapter that changes nothing."""
    names, shapes = {}, {}
    for name, parameter in policy.named_parameters():
        if (saved := saved_name(name.removeprefix("model."))) is not None:
            names[name] = saved
            shapes[saved] = tuple(parameter.shape)
    return Source(directory, initial(shapes, seed), names, base, lora)


def _described(directory: Path, train: TrainSettings, device: torch.device) -> Any:
    """The model of this configuration on the meta device: shapes and code, no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config: Any = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("its weights are quantised. Give the model before quantisation.")
        kernel = attention(device, train, _kind(config))
        if kernel == _VARLEN:  # its backward pass adds up in any order, unless it is asked not to
            os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=torch.float32,
                attn_implementation=kernel,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"transformers cannot load `{directory}`: {why}") from error
    for module in model.modules():
        # Dropout would make the policy another one than that which sampled.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if train.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers checkpoints activations in the training mode alone.
    model.train(train.activation_checkpointing)
    return model.requires_grad_(True)


def _value_head_weights(policy: Policy, seed: int) -> dict[str, Tensor]:
    """A function of the seed alone, whatever the device or the number of processes."""
    size = policy.model.get_output_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(1, size).normal_(0.0, 1 / (size + 1), generator=generator)
    return {f"{VALUE_HEAD}weight": weight, f"{VALUE_HEAD}bias": torch.zeros(1)}


@torch.no_grad()
def _materialise(policy: Policy, device: torch.device, weights: Mapping[str, Tensor]) -> None:
    """Memory for what this process has of the policy, and its values."""
    policy.to_empty(device=device)
    policy.model.tie_weights(recompute_mapping=False)  # new memory was given to each name
    for parameter in policy.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    # What files never hold, such as the frequencies of rotary embeddings.
    policy.model.initialize_weights()
    for name, parameter in policy.named_parameters():
        local(parameter).copy_(shard_of(weights[name], parameter))


def _names(
    policy: Policy, model: Any, tensors: Mapping[str, Tensor], directory: Path
) -> dict[str, str]:
    """The checkpoint's names; some were saved without the prefix of the base model."""
    names = {}
    prefix = f"{model.base_model_prefix}."
    for name, parameter in policy.named_parameters():
        own = plain(name.removeprefix("model."))
        if saved_name(own) is not None:
            continue  # of an adapter
        saved = own if own in tensors else own.removeprefix(prefix)
        if saved not in tensors or tensors[saved].shape != parameter.shape:
            raise ModelError(
                f"parameter `{own}` is not in the files of `{directory}` under this name and "
                "shape. Such models cannot be published; save the model in a plain form."
            )
        names[name] = saved
    _refuse_rest(policy, names, tensors, directory)
    return names


def _refuse_rest(
    policy: Policy, names: Mapping[str, str], tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """What the files hold of the model beside its parameters would be lost without a word.

    That is a buffer (one that no file ever holds is not saved, and is computed), or a tensor that
    the configuration ties to another although they differ.
    """
    prefix = f"{policy.model.base_model_prefix}."
    first = {id(p): names[name] for name, p in policy.named_parameters() if name in names}
    state = policy.state_dict(keep_vars=True)  # with what is tied, without what is never saved
    for name, tensor in state.items():
        own = plain(name.removeprefix("model."))
        saved = own if own in tensors else own.removeprefix(prefix)
        if saved not in tensors:
            continue
        if id(tensor) not in first:
            raise ModelError(
                f"`{saved}` in the files of `{directory}` is a buffer, which is neither trained "
                "nor published. Use another model."
            )
        tied = first[id(tensor)]
        if tied != saved and not torch.equal(tensors[tied], tensors[saved]):
            raise ModelError(
                f"`{saved}` and `{tied}` differ in the files of `{directory}`, whose config.json "
                "ties them. Set tie_word_embeddings to false there, or save the model anew."
            )


@torch.no_grad()
def _check_head(policy: Policy, directory: Path) -> None:
    """Some models scale or cap their logits: then the head alone is not what they compute."""
    tokens = torch.arange(4, device=policy.device)[None] % policy.vocab_size

    def same() -> bool:
        ours, theirs = policy.both_logits(tokens)
        return torch.allclose(ours, theirs, rtol=_HEAD_TOLERANCE, atol=_HEAD_TOLERANCE)

    native = policy.native and same()
    if policy.native and not native:
        _log.warning("the kernels do not compute what the model in `%s` does", directory)
    policy.native = False
    right = same()  # whatever was found before: a pass is collective
    policy.native = native
    if not right:
        raise ModelError(
            f"the model in `{directory}` changes its logits after the output layer (caps or "
            "scales them), which the trainer does not do. Use another model."
        )


@contextmanager
def other_weights(
    policy: Policy, names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """The policy with other weights, by the names of published ones; what is not among them (the
    value head, the base of an adapter) stays.

    For forward passes without gradients. In one process no weight is copied that is float32.
    """
    own: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for name, parameter in policy.named_parameters():
            if name not in names:
                continue
            other = tensors[names[name]]
            if isinstance(parameter, DTensor):
                mine = local(parameter)
                own.append((parameter, mine.clone()))
                mine.copy_(shard_of(other, parameter))
            else:
                own.append((parameter, parameter.data))
                parameter.data = other.to(parameter.device, torch.float32)
        yield
    finally:
        for parameter, data in own:
            if isinstance(parameter, DTensor):
                local(parameter).copy_(data)
            else:
                parameter.data = data
