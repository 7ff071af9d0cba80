"""Every call into vLLM. Knows requests by their ids, and neither versions nor trajectories.

vLLM's engine is stepped in this process, one token a request: nothing of it outlives the process,
and nothing is under way between two steps.
"""

import dataclasses
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm  # type: ignore[import-not-found]
from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig  # type: ignore[import-not-found]
from vllm.exceptions import VLLMClientError  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.base import Sampling
from dora_rl.engines.vllm import kv_connector, raw_logits
from dora_rl.engines.vllm.environment import check_arguments, check_version
from dora_rl.engines.vllm.kv_connector import BlockKv, BlockLayout, HandedKv
from dora_rl.engines.vllm.raw_logits import RawLogits

REFUSALS = (ValueError, TypeError, VLLMClientError)  # what vLLM raises for what it does not take
_PROBE = "probe"
_FIRST = -1  # the priority of the probe; those of trajectories are their ages
_FIXED = {
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "logits_processors": [RawLogits],
    "scheduling_policy": "priority",
    "async_scheduling": False,
    "disable_log_stats": True,
}


class Emitted(NamedTuple):
    """The token that a request got in a step."""

    request: str
    token: int | None  # none where vLLM has ended it without one
    logprob: float
    raw_logprob: float | None
    ended: str | None  # vLLM's word for why it runs no further


class LoadedAdapter(NamedTuple):
    """A LoRA adapter as vLLM knows it: never the same id for two."""

    id: int
    name: str
    path: str

    def request(self) -> LoRARequest:
        return LoRARequest(self.name, self.id, self.path)


class Backend:
    """One vLLM engine; its weights come by `reload`, or it has a base and adapters."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments` are those of `EngineArgs`, but for what is set here for every engine."""
        check_version(vllm.__version__, Path(sys.executable))
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        check_arguments(arguments, known, vllm.__version__)
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        self._raw: set[str] = set()  # requests that want raw log-probabilities
        self._backlog: deque[list[Emitted]] = deque()  # steps that a probe took
        try:
            # One place more than is asked for, which is the probe's: it waits for no slot.
            slots = self._arguments["max_num_seqs"]
            places = {"max_num_seqs": slots + 1, "max_num_active_seqs": slots}
            handing = KVTransferConfig(
                kv_connector=HandedKv.__name__,
                kv_connector_module_path=HandedKv.__module__,
                kv_role="kv_consumer",
            )
            arguments = EngineArgs(
                **_FIXED, **{**self._arguments, **places}, kv_transfer_config=handing
            )
            self._engine = LLMEngine.from_engine_args(arguments)
        except (*REFUSALS, NotImplementedError) as error:
            # Of the configuration; whatever else there is may be over when it is tried again.
            raise UserError(
                f"vLLM {vllm.__version__} does not start with the model in "
                f"`{self._arguments['model']}`: {type(error).__name__}: {error} (The room "
                "for its KV is rollout.kv_budget_tokens, its context rollout.vllm.context.)"
            ) from error
        self._raw_logits = RawLogits.newest
        # vLLM sets a request's generator back after a part of its prompt, and fails on a CPU, whose
        # generators cannot. There all requests share one: never the same in two engines.
        self._seeded = torch.cuda.is_available()
        if not self._seeded:
            torch.seed()
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        pool = self._scheduler.kv_cache_manager.block_pool
        self.num_blocks: int = pool.num_gpu_blocks - 1  # one of them is never given out
        self._handed: HandedKv = self._scheduler.connector
        self.kv_layout: BlockLayout | None = self._handed.layout

    def restart(self) -> None:
        """Begin anew, without weights: after a reload that failed, vLLM may hold parts of it.

        Layers that were half read keep what they have, and would mix it with the next version.
        """
        self._end()
        self._start()

    # Weights

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; no request may be here. KV of the old ones is forgotten."""
        self._engine.reset_prefix_cache()
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.apply_model(_pack_tied_head)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Load it beside the others; requests may be running."""
        self._engine.add_lora(adapter.request())

    def adapter_tensors(self, adapter: LoadedAdapter) -> dict[str, tuple[Tensor, Tensor]]:
        """A and the scaled B of every module of a loaded adapter, as they are in vLLM's memory."""
        found: list[dict[str, tuple[Tensor, Tensor]]]
        found = self._engine.collective_rpc(_tensors_in_memory, args=(adapter.id,))
        return found[0]

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """No request of it may be here. Unknown: does nothing."""
        self._engine.remove_lora(adapter.id)

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it.

        No other request may be here, and no adapter: vLLM 0.32 fails for a prompt of one in a batch
        with others on a CPU.
        """
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        found: list[Any] = []
        self._engine.add_request(_PROBE, {"prompt_token_ids": list(tokens)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found = output.prompt_logprobs or found
        return [place[token].logprob for place, token in zip(found[1:], tokens[1:], strict=True)]

    def next_logprob(self, tokens: Sequence[int], token: int, adapter: LoadedAdapter) -> float:
        """The log-probability of a token after these, at temperature 1.

        Other requests go on meanwhile; the next calls of `step` tell what they got.
        """
        self.add(
            _PROBE,
            tokens,
            Sampling(temperature=0.0, raw_logprobs=True),
            max_tokens=1,
            stop_token_ids=(),
            seed=0,
            salt=f"{_PROBE} {adapter.id}",  # nothing of an earlier install proves this one
            adapter=adapter,
            priority=_FIRST,
        )
        self._raw.discard(_PROBE)  # of another token than the one that is sampled
        self._scheduler.max_num_active_reqs += 1  # it has a place of its own: see `_start`
        try:
            answered = False
            while not answered:
                outputs: list[Any] = self._engine.step()
                answered = any(output.request_id == _PROBE for output in outputs)
                others = [output for output in outputs if output.request_id != _PROBE]
                if emitted := [one for output in others for one in self._read(output)]:
                    self._backlog.append(emitted)
            return self._raw_logits.take(_PROBE, token)
        finally:
            self._scheduler.max_num_active_reqs -= 1
            self._raw_logits.forget(_PROBE)

    # Requests

    def add(
        self,
        request: str,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int,
        salt: str,
        adapter: LoadedAdapter | None,
        priority: int,
        kv: BlockKv | None = None,
    ) -> None:
        """Queue a request; `salt` keeps its KV apart from that of every other salt.

        On a GPU its noise is a function of `seed`. What `kv` has of it is not computed.
        """
        extra: dict[str, Any] = {}
        if sampling.raw_logprobs:
            extra[raw_logits.KEY] = request
            self._raw.add(request)
        if kv is not None and kv.tokens:
            extra["kv_transfer_params"] = {kv_connector.KEY: request}
            self._handed.hand(request, kv)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,  # the ends of text are among the stop tokens where they count
            seed=seed if self._seeded else None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": salt}
        lora = None if adapter is None else adapter.request()
        self._engine.add_request(request, prompt, params, lora_request=lora, priority=priority)

    def abort(self, request: str) -> None:
        self._raw.discard(request)
        self._raw_logits.forget(request)
        self._handed.forget(request)
        for number, step in enumerate(self._backlog):
            self._backlog[number] = [emitted for emitted in step if emitted.request != request]
        self._engine.abort_request([request])

    def step(self) -> list[Emitted]:
        """One token for every request that runs and whose prompt is read."""
        if self._backlog:
            return self._backlog.popleft()
        return [emitted for output in self._engine.step() for emitted in self._read(output)]

    def _read(self, output: Any) -> list[Emitted]:
        """What vLLM says of one request after a step."""
        (completion,) = output.outputs
        if not completion.token_ids and not output.finished:
            return []
        request, ended = output.request_id, completion.finish_reason
        emitted = []
        for token, logprob in zip(completion.token_ids, _logprobs(completion), strict=True):
            raw = self._raw_logits.take(request, token) if request in self._raw else None
            emitted.append(Emitted(request, token, logprob, raw, ended))
        if not completion.token_ids:
            emitted.append(Emitted(request, None, math.nan, None, ended or "abort"))
        if output.finished:
            self._raw.discard(request)
        return emitted

    def copy_kv(self, request: str, most: int) -> BlockKv | None:
        """What is computed of a request, up to so many tokens; None if nothing is."""
        for internal in self._engine.output_processor.external_req_ids.get(request, ()):
            found = self._scheduler.requests[internal]
            if tokens := min(found.num_computed_tokens, most):
                (block_ids,) = self._scheduler.kv_cache_manager.get_block_ids(internal)
                return self._handed.copy(block_ids, tokens)
        return None

    @property
    def running(self) -> list[str]:
        """Requests that have a slot."""
        states = self._engine.output_processor.request_states  # by ids that vLLM made of ours
        running = (states.get(request.request_id) for request in self._scheduler.running)
        return [state.external_req_id for state in running if state is not None]

    @property
    def used_blocks(self) -> int:
        share: float = self._scheduler.get_kv_cache_usage()
        return round(share * self.num_blocks)

    def close(self) -> None:
        """It must not be used again."""
        self._end()

    def _end(self) -> None:
        self._engine.engine_core.shutdown()


def _tensors_in_memory(worker: Any, adapter: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs where vLLM's worker is, which is this process."""
    manager = worker.model_runner.lora_manager._adapter_manager
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, held in manager.get_adapter(adapter).loras.items():
        modules, parts = [name], [(held.lora_a, held.lora_b, held.scaling)]
        if isinstance(held.lora_a, list):  # modules that vLLM has side by side
            modules = manager.packed_modules[name]
            parts = list(zip(held.lora_a, held.lora_b, held.scaling, strict=True))
        for module, (down, up, scaling) in zip(modules, parts, strict=True):
            if down is not None:
                found[module] = down, up if scaling == 1 else up * scaling
    return found


def _pack_tied_head(model: Any) -> None:
    """Pack a head that is tied to the embedding anew.

    vLLM's reload passes it over, as no tensor has its name; on a CPU it would go on with a packed
    copy of the old embedding.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    if getattr(head, "weight", head) is getattr(embedding, "weight", None):
        head.quant_method.process_weights_after_loading(head)


def _logprobs(completion: Any) -> list[float]:
    """Of the sampled tokens, from vLLM's flat form."""
    flat = completion.logprobs
    return [flat.logprobs[start] for start in flat.start_indices] if flat is not None else []
