"""The embedded engine: continuous batching over several live versions, in this process.

One step, by file: `engine` asks `scheduler` who runs, `forwarding` makes rows of them,
`attention` reads the blocks of `kv`, `sampler` draws, and `engine` reports.
"""

from dora_rl.engines.embedded.engine import EmbeddedEngine
from dora_rl.engines.embedded.settings import EngineSettings

__all__ = ["EmbeddedEngine", "EngineSettings"]
