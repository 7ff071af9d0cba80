"""One side of a migration: an engine, and a socket to the engine of the other side.

Also runs in the environment of an engine that has its own.
"""

import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.kv_room import BLOCK_TOKENS, blocks_for
from dora_rl.engines.registry import EngineName, EngineOptions, create_engine, most_versions
from dora_rl.transports.weights.shared_directory import WeightStore

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20
_WARM = 0  # a trajectory; those that move count from 1
_WARM_TOKENS = 64


class Mover:
    """An engine with version 0 of the store `weights`, for one sequence at a time.

    Sequences have up to `tokens` tokens.
    """

    def __init__(
        self,
        directory: str,
        weights: str,
        threads: int,
        tokens: int,
        fd: int,
        engine: str = EngineName.EMBEDDED,
    ) -> None:
        torch.set_num_threads(threads)
        self._pipe = socket.socket(fileno=fd)
        defaults = EngineSettings()
        kind = EngineName(engine)
        options = EngineOptions(
            model=Path(directory),
            slots=1,
            version_slots=most_versions(kind, defaults.version_slots, lora=False),
            # A prompt and what follows it begin a block each.
            kv_budget_tokens=(blocks_for(tokens) + 2) * BLOCK_TOKENS,
            kv_dtype=defaults.kv_dtype,
            prefill_chunk=defaults.prefill_chunk,
            deterministic=False,
        )
        self._engine = create_engine(kind, options)
        # Where noise begins anew after a move, only greedy continuations can be compared.
        self._temperature = 1.0 if self._engine.capabilities.exact_noise else 0.0
        self._warm_tokens = min(tokens - 2, _WARM_TOKENS)
        self._version = WeightStore(Path(weights)).path(0)
        self._engine.install(0, self._version)

    def empty(self) -> None:
        """Forget all that was read, for no cache to know what comes; no trajectory may be here.

        Then read a text of one token over and over, which shares no block with random ones: the
        first steps with new weights are slower.
        """
        self._engine.evict(0)
        self._engine.install(0, self._version)
        self.begin(_WARM, [0] * self._warm_tokens, [], more=1)
        self._next(1)

    def begin(self, trajectory: int, prompt: list[int], prefix: list[int], more: int) -> list[int]:
        """Read all of it, and make the next token; `more` may follow."""
        sampling = Sampling(
            temperature=self._temperature, max_tokens=len(prefix) + 1 + more, ignore_eos=True
        )
        request = Request(trajectory, 0, tuple(prompt), sampling, prefix=tuple(prefix))
        self._engine.submit(request)
        return self._next(1)

    def hand_over(self, trajectory: int) -> dict[str, Any]:
        """Export a trajectory, and send it to the other side."""
        began = time.perf_counter()
        data = self._engine.export_trajectory(trajectory)
        export_s = time.perf_counter() - began
        self._pipe.sendall(_LENGTH.pack(len(data)))
        self._pipe.sendall(data)
        return {"export_s": export_s, "bytes": len(data)}

    def take_over(self) -> dict[str, Any]:
        """Receive a trajectory, continue with it, and make its next token."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        began = time.perf_counter()
        data = self._read(length)
        received = time.perf_counter()
        self._engine.import_trajectory(data)
        tokens = self._next(1)
        return {
            "transfer_s": received - began,
            "import_s": time.perf_counter() - received,
            "tokens": tokens,
        }

    def go_on(self, trajectory: int, count: int) -> list[int]:
        """The next tokens of a trajectory, which is then forgotten."""
        self._engine.resume(trajectory)
        tokens = self._next(count)
        self._engine.cancel(trajectory)
        return tokens

    def _next(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            if self._engine.idle:
                raise RuntimeError(f"idle after {len(tokens)} of {count} tokens")
            for output in self._engine.step():
                if not isinstance(output, Sampled):
                    raise RuntimeError(f"the engine was not to do this: {output}")
                tokens.extend(output.tokens)
        return tokens

    def _read(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            part = self._pipe.recv(min(left, _CHUNK))
            if not part:
                raise EOFError("the other side is gone")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def load(**settings: Any) -> Mover:
    return Mover(**settings)
