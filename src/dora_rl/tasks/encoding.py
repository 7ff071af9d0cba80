"""Prompts and observations into tokens, and responses into text.

With a chat template a prompt is a conversation, and what an environment says is a message in
it; without one both are plain text.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_rl.extras import require
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.settings import TaskSettings

# Stands for what the policy wrote when a later turn is rendered; in no template and no text.
_RESPONSE = "\N{REFERENCE MARK}dora-rl response\N{REFERENCE MARK}"


class Encoder:
    """The tokenizer of a model with its chat template."""

    def __init__(self, model_directory: str | Path, settings: TaskSettings) -> None:
        try:
            from dora_rl.models.tokenizer import FILE, load_tokenizer
            from dora_rl.tasks.templates import load_template
        except ImportError:
            require("task", "engine", "train")
            raise

        directory = Path(model_directory)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise TaskError(
                f"no tokenizer in `{directory}`: {FILE} is missing. Save the tokenizer there."
            )
        self._tokenizer = tokenizer
        self._settings = settings
        description = (directory / FILE).read_bytes()
        self._special = _special_texts(description)
        self._template = None if settings.chat == "never" else load_template(directory)
        if self._template is None and settings.chat == "always":
            raise TaskError(
                f"no chat template in `{directory}`. Add chat_template.jinja, or set "
                "task.chat = never."
            )
        self._digest = hashlib.blake2b(description, digest_size=16)

    @property
    def chat(self) -> bool:
        """Whether prompts are conversations."""
        return self._template is not None

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides how text becomes tokens."""
        digest = self._digest.copy()
        template = None if self._template is None else self._template.source
        settings = self._settings
        rest = [template, settings.system, settings.observation_role]
        digest.update(json.dumps(rest).encode())
        return digest.hexdigest()

    def encode(
        self, prompt: Prompt, observation: str | Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a prompt; an environment's first observation takes its place."""
        text = prompt.text if observation is None else observation
        if text is None:
            text = list(prompt.messages or ())
        tokens = self._encode(text)
        if not tokens:
            raise TaskError(
                f"prompt {prompt.position} has no tokens: `{text!r:.60}`. Give it text."
            )
        return tokens

    def observation(self, text: str, *, ended: bool = True) -> list[int]:
        """The tokens after a response that an environment answered, up to the next response.

        `ended`: the response's last token is the one that ends a turn.
        """
        if self._template is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        turn = {"role": self._settings.observation_role, "content": text}
        before = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _RESPONSE},
        ]
        whole = self._template.render([*before, turn], generate=True)
        _, found, rest = whole.partition(_RESPONSE)
        if not found:
            raise TaskError(
                "the chat template leaves out what the model said earlier: an environment cannot "
                "continue from there. Set task.chat = never."
            )
        if ended:
            rest = self._without_end(rest)
        return self._tokenizer.encode(rest, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self._tokenizer.decode(tokens)

    def shown(self, tokens: Sequence[int]) -> str:
        """Tokens as text with the special ones, for a reader."""
        return self._tokenizer.shown(tokens)

    def length(self, content: str | Sequence[dict[str, Any]]) -> int:
        """How many tokens a prompt has."""
        return len(self._encode(content))

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a response."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode(self, content: str | Sequence[dict[str, Any]]) -> list[int]:
        system = self._settings.system
        if self._template is None:
            if not isinstance(content, str):
                raise TaskError(
                    "the prompts are messages, but no chat template is applied. "
                    "Set task.chat, or give prompts as text."
                )
            return self._tokenizer.encode(f"{system}\n\n{content}" if system else content)
        messages = (
            [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        )
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        # Templates write the special tokens themselves.
        rendered = self._template.render(messages, generate=True)
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    def _without_end(self, text: str) -> str:
        """Without the special token that ends a turn, which the policy has written itself."""
        ends = [special for special in self._special if text.startswith(special)]
        return text[len(max(ends, key=len)) :] if ends else text


def _special_texts(description: bytes) -> list[str]:
    tokens = json.loads(description).get("added_tokens") or []
    return [token["content"] for token in tokens if token.get("special")]
