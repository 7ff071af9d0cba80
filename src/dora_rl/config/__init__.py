"""TOML files and `--set` overrides into validated settings, and back.

Knows no particular configuration: callers bring the pydantic model (or frozen dataclass).
Whatever the user got wrong leaves here as one `UserError` of one line, which names the key,
the value and the fix.
"""

from dora_rl.config.files import apply_overrides, dump_toml, load_toml, merged
from dora_rl.config.validation import ConfigModel, validate

__all__ = ["ConfigModel", "apply_overrides", "dump_toml", "load_toml", "merged", "validate"]
