"""One side of a migration: an engine, and a socket to the engine of the other side."""

import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.transports.weights.shared_directory import WeightStore

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20


class Mover:
    """An engine with version 0, for sequences of up to `tokens` tokens, one at a time."""

    def __init__(self, directory: str, weights: str, threads: int, tokens: int, fd: int) -> None:
        torch.set_num_threads(threads)
        self._pipe = socket.socket(fileno=fd)
        block = EngineSettings().block_tokens
        # A prompt and what follows it begin a block each.
        settings = EngineSettings(slots=1, kv_budget_tokens=(-(-tokens // block) + 2) * block)
        self._engine = EmbeddedEngine.for_model(directory, settings)
        store = WeightStore(Path(weights))
        store.publish_directory(0, Path(directory))
        self._engine.install(0, store.path(0))

    def begin(self, trajectory: int, prompt: list[int], prefix: list[int], more: int) -> list[int]:
        """Read all of it, and make the next token; `more` may follow."""
        sampling = Sampling(max_tokens=len(prefix) + 1 + more, ignore_eos=True)
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
