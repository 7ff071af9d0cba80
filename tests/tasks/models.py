"""Model directories that hold a tokenizer and a chat template, and no weights."""

import json
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = ["<|begin|>", "<|start|>", "<|end|>"]
CHATML = """
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""


def make_directory(
    path: Path, *, template: str | list[dict[str, str]] | None = CHATML, begin: bool = False
) -> Path:
    """A byte-level tokenizer with special tokens; `begin` puts one before every plain text."""
    path.mkdir(parents=True, exist_ok=True)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    inner.train_from_iterator(["user assistant system\n hello world\n\n naïve 🦊"], trainer)
    if begin:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    inner.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
