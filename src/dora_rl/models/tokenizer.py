"""Tokens to text and back, and the search for stop strings while a text grows.

A thin layer over the `tokenizers` library; chat templates and prompts are not its business.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dora_rl.models.errors import ModelError

FILE = "tokenizer.json"
_MAX_BYTES = 256 << 20  # the largest known ones have some 40 MB
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character


class Tokenizer:
    """What a tokenizer.json describes; special tokens have no text."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # a file may ask for either; a prompt must stay what it is
        inner.no_padding()
        self._inner = inner
        self._additive = _is_additive(inner)
        self._own_chars: dict[int, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of the text; special ones, such as a begin of text, where the file says so."""
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(tokens, skip_special_tokens=True)

    def shown(self, tokens: Sequence[int]) -> str:
        """The text with its special tokens, as the model reads it."""
        return self._inner.decode(tokens, skip_special_tokens=False)

    def own_chars(self, token: int) -> int:
        """A number of characters that the token begins with, whatever its neighbours are.

        If it is not 0, the text before the token does not depend on the token and what follows,
        and the text from there on does not depend on what came before (but for a space).
        """
        chars = self._own_chars.get(token)
        if chars is None:
            chars = self._own_chars[token] = self._count_own_chars(token)
        return chars

    def _count_own_chars(self, token: int) -> int:
        name = self._inner.id_to_token(token)
        # Tokens such as <0x41> decode together, as a run of bytes.
        if not self._additive or name is None or (name[:3] == "<0x" and name[-1] == ">"):
            return 0
        return len(self.decode((token,)).partition(_BROKEN)[0])


class StopStrings:
    """Whether the newest token completed a stop string, by the text of the last few tokens."""

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._tokenizer = tokenizer

    def completed(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string stands in the text of all these generated tokens.

        Exact if none did before the last token, as for whoever asks after each and ends at the
        first. A new one then overlaps what the last token changed, and no token changes the own
        characters of those before it; so it reaches back over fewer of them than it is long.
        One more is decoded, for the space that a text may lose at its start.
        """
        if not self._stops or not tokens:
            return False
        own_chars = self._tokenizer.own_chars
        start, before = len(tokens) - 1, self._longest
        while start > 0 and before > 0:
            start -= 1
            before -= own_chars(tokens[start])
        text = self._tokenizer.decode(tokens[start:])
        return any(stop in text for stop in self._stops)


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a model directory, if it has one."""
    path = Path(directory) / FILE
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size > _MAX_BYTES:  # the library would take memory for all of it
        raise ModelError(f"`{path}` has {size} bytes; the limit is {_MAX_BYTES}. It is not read.")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # nothing more particular; a panic is no Exception
        raise ModelError(f"not a tokenizer: `{path}`: {error}. Copy the file again.") from None
    return Tokenizer(inner)


def _is_additive(inner: tokenizers.Tokenizer) -> bool:
    """Whether a text is the texts of its tokens in a row, but for bytes and a leading space.

    So are byte-level BPE (Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2). With
    any other decoder a text is decoded as a whole.
    """
    if inner.decoder is None:
        return True  # a space between any two
    description: dict[str, Any] = json.loads(inner.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    joined = False
    for step in steps:
        kind = step["type"]
        if kind == "Strip" and joined:
            if step["stop"]:
                return False
        elif joined or kind not in ("Replace", "ByteFallback", "Strip", "Fuse", "ByteLevel"):
            return False
        joined = joined or kind in ("Fuse", "ByteLevel")
    return True
