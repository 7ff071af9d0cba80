"""The prompts of a run, in an order that is a pure function of position and seed.

A stream is read by position, again and again if need be: a resumed run reads what the first one
would have. It knows nothing of tokens.
"""

import hashlib
import json
from typing import Any

import msgspec

from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.fingerprints import UNREADABLE
from dora_rl.tasks.permutations import permute
from dora_rl.tasks.sources import Row, Source

_ROLES_AND_TEXT = 'Write {"role": "user", "content": "…"}.'


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: `text`, or `messages` for a chat; `example` is the row that it came from."""

    position: int
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    example: dict[str, Any] = {}
    answer: Any = None


class PromptStream:
    """Rows of a source as prompts: shuffled anew in each epoch, if they can be counted."""

    def __init__(
        self,
        source: Source,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        limit: int | None = None,
        code: Any = None,
    ) -> None:
        """`code` is the text of what makes the rows, where they are not data."""
        self._source = source
        self._code = code
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._limit = limit
        self._fingerprint: str | None = None
        if not self.read(0, 1):
            raise TaskError(f"no prompts in {source.name}. Give at least one.")

    @property
    def size(self) -> int | None:
        """How many prompts there are in all, if that is known and bounded."""
        length = self._source.length
        if length is None or self._epochs is None:
            return self._limit
        whole = length * self._epochs
        return whole if self._limit is None else min(whole, self._limit)

    def read(self, first: int, count: int) -> list[Prompt]:
        """The prompts at `first`, `first + 1`, …; fewer than `count` if the stream ends there."""
        prompts = []
        for position in range(first, first + count):
            row = self._row(position)
            if row is None:
                break
            prompts.append(self._prompt(position, row))
        return prompts

    @property
    def fingerprint(self) -> str:
        """A digest of the data and of the code that makes it: another one, other prompts."""
        if self._code == UNREADABLE:
            return UNREADABLE
        if self._fingerprint is None:
            keys = json.dumps([self._prompt_key, self._answer_key])
            digest = hashlib.blake2b(keys.encode(), digest_size=16)
            digest.update(self._source.identity().encode())
            if self._code is not None:
                digest.update(json.dumps(self._code).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _row(self, position: int) -> Row | None:
        if self._limit is not None and position >= self._limit:
            return None
        length = self._source.length
        if length is None:
            # Of unknown length: in the order of the source, and perhaps its end is found now.
            row = self._source.row(position)
            length = self._source.length
            if row is not None or length is None or length == 0:
                return row
        epoch, index = divmod(position, length) if length else (0, 0)
        if length == 0 or (self._epochs is not None and epoch >= self._epochs):
            return None
        if self._shuffle and self._source.random_access:
            index = permute(index, length, self._seed, epoch)
        return self._source.row(index)

    def _prompt(self, position: int, row: Row) -> Prompt:
        where = f"row {position} of {self._source.name}"
        content = prompt_of(row, self._prompt_key, where)
        text = content if isinstance(content, str) else None
        return Prompt(
            position=position,
            text=text,
            messages=None if text is not None else tuple(content),  # type: ignore[arg-type]
            example=row,
            answer=row.get(self._answer_key),
        )


def prompt_of(row: Row, key: str, where: str) -> str | list[dict[str, Any]]:
    """The text or the messages of a row, checked."""
    if key not in row:
        known = ", ".join(f"`{name}`" for name in list(row)[:8]) or "no key"
        raise TaskError(f"{where} has no `{key}`: it has {known}. Set task.prompt_key.")
    content = row[key]
    if isinstance(content, str):
        problem = None if content else f"`{key}` is empty. Give it text."
    else:
        problem = check_messages(content)
    if problem is not None:
        raise TaskError(f"{where}: {problem}")
    return content  # type: ignore[no-any-return]


def check_messages(content: Any) -> str | None:
    """What is wrong with the messages of a chat, if anything."""
    if not isinstance(content, list | tuple) or not content:
        return f"neither text nor messages: `{content!r:.60}`. {_ROLES_AND_TEXT}"
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"not a message: `{message!r:.60}`. {_ROLES_AND_TEXT}"
        if not isinstance(message.get("content"), str):
            return f"a message without text: `{message!r:.60}`. {_ROLES_AND_TEXT}"
    return None
