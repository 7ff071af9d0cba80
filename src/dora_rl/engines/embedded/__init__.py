"""The embedded engine: continuous batching over several live versions, in this process.

One step, by file: `engine` asks `scheduler` who runs, `speculator` adds drafts where few do,
`forwarding` or `native_forwarding` makes rows of them, `attention` reads the blocks of `kv` where
the kernels do not, `sampler` draws, and `engine` reports.
"""

from dora_rl.engines.embedded.engine import EmbeddedEngine
from dora_rl.engines.embedded.settings import EngineSettings

__all__ = ["EmbeddedEngine", "EngineSettings"]
