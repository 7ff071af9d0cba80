"""The policy: any causal language model of transformers, with its head applied in chunks.

Master weights are float32. Parameters go by the names that the model's own checkpoint has, and
a tied one appears once, so that what is published is what an engine expects.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dora_rl import extras
from dora_rl.models import cpu
from dora_rl.models.errors import ModelError
from dora_rl.trainer.logprobs import token_logprobs
from dora_rl.trainer.settings import Dtype, TrainSettings
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import digests, weights_digest

VALUE_HEAD = "value_head."
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

    def add_value_head(self, seed: int) -> None:
        size = self.model.get_output_embeddings().weight.shape[1]
        head = nn.Linear(size, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            head.weight.normal_(0.0, 1 / (size + 1), generator=generator)
            head.bias.zero_()
        self.value_head = head.to(self.model.get_output_embeddings().weight.device)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, input_BT: Tensor, positions_T: Tensor, targets_T: Tensor, sampled_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies (0 where nothing was sampled), and values."""
        with torch.autocast(input_BT.device.type, torch.bfloat16, enabled=self._bf16):
            hidden = self.model.base_model(input_ids=input_BT, use_cache=False).last_hidden_state
        hidden_TD = hidden.flatten(0, 1).index_select(0, positions_T)
        if self._bf16:
            hidden_TD = hidden_TD.bfloat16()
        values_T = None
        if self.value_head is not None:
            values_T = self.value_head(hidden_TD.float()).sum(1)  # no view: FSDP hooks it
        if sampled_T is None:
            return *self._score(hidden_TD, targets_T), values_T
        logprobs, entropy = self._score(
            hidden_TD.index_select(0, sampled_T), targets_T.index_select(0, sampled_T)
        )
        nothing_T = torch.zeros(len(targets_T), device=logprobs.device)
        logprobs_T = nothing_T.index_copy(0, sampled_T, logprobs)
        return logprobs_T, nothing_T.index_copy(0, sampled_T, entropy), values_T

    def _score(self, hidden_MD: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden_MD,
            head.weight,
            targets_M,
            temperature=self._temperature,
            chunk=self._chunk,
            bias_V=getattr(head, "bias", None),
        )


@dataclass(frozen=True)
class Source:
    """The model directory that training starts from: the initial policy, mapped from its files."""

    directory: Path
    tensors: dict[str, Tensor]
    names: dict[str, str]  # the checkpoint's name of each parameter of the policy

    def digest(self) -> str:
        return weights_digest(self.tensors, digests(self.tensors))


def load(directory: Path, train: TrainSettings, temperature: float) -> tuple[Policy, Source]:
    """The policy in float32, and where it came from. Safetensors only; no code of the model's."""
    directory = Path(directory)
    extras.require("dora-rl train", "engine", "train")
    cpu.guard()
    if not (directory / "config.json").is_file():
        raise ModelError(f"no config.json in `{directory}`. Give a Hugging Face model directory.")
    tensors = map_model(directory)
    model = _load(directory, train)
    policy = Policy(model, train, temperature)
    _check_head(policy, directory)
    return policy, Source(directory, tensors, _names(policy, model, tensors, directory))


def _load(directory: Path, train: TrainSettings) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
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
    if torch.cuda.is_available():
        model.cuda()
    return model.requires_grad_(True)


def _names(
    policy: Policy, model: Any, tensors: Mapping[str, Tensor], directory: Path
) -> dict[str, str]:
    """The checkpoint's names; some were saved without the prefix of the base model."""
    names = {}
    prefix = f"{model.base_model_prefix}."
    for name, parameter in policy.named_parameters():
        own = name.removeprefix("model.")
        saved = own if own in tensors else own.removeprefix(prefix)
        if saved not in tensors or tensors[saved].shape != parameter.shape:
            raise ModelError(
                f"parameter `{own}` is not in the files of `{directory}` under this name and "
                "shape. Such models cannot be published; save the model in a plain form."
            )
        names[name] = saved
    return names


@torch.no_grad()
def _check_head(policy: Policy, directory: Path) -> None:
    """Some models scale or cap their logits: then the head alone is not what they compute."""
    tokens = torch.arange(4, device=policy.device)[None] % policy.vocab_size
    bf16, policy._bf16 = policy._bf16, False
    try:
        theirs = policy.model(input_ids=tokens, use_cache=False).logits[0].float()
        hidden = policy.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        ours = policy.model.get_output_embeddings()(hidden)
    finally:
        policy._bf16 = bf16
    if not torch.allclose(ours, theirs, rtol=_HEAD_TOLERANCE, atol=_HEAD_TOLERANCE):
        raise ModelError(
            f"the model in `{directory}` changes its logits after the output layer (caps or "
            "scales them), which the trainer does not do. Use another model."
        )


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every process of the group must ask."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of `like`."""
    if not isinstance(like, DTensor):
        return value
    whole = value.to(like.device, like.dtype)
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


@contextmanager
def other_weights(
    policy: Policy, names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """The policy with other weights, by their names in a checkpoint; the value head keeps its own.

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
                mine.copy_(part_of(other, parameter))
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
