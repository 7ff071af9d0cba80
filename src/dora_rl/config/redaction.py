"""Which values of a configuration are secrets, and the configuration without them.

A value is one by the name of its key, or by its own look. What is saved, shown or logged passes
here first. Knows plain data alone; imports nothing of the project.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

Loc = tuple[str | int, ...]

_SHORTEST = 4  # characters of a secret that is looked for in a text: `1` is in every other line
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of api_key, apiKey, API-KEY
_SECRET_WORDS = frozenset(
    (
        *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd"),
        *("passcode", "passcodes", "userpass"),
        *("credential", "credentials", "authorization", "apikey", "apikeys", "privatekey"),
        *("authtoken", "accesstoken", "bearer"),
    )
)
# `key` alone is often the name of a column; after these it opens something.
_KEY_OF = frozenset(("api", "private", "access", "secret", "signing", "encryption", "ssh", "auth"))
_KEY = frozenset(("key", "keys"))
# With one of these, a token is a piece of text, or is counted.
_TEXT_WORDS = frozenset(
    (
        *("bos", "eos", "pad", "unk", "mask", "sep", "cls", "stop", "special", "added", "image"),
        *("start", "end", "begin", "think", "prefix", "suffix", "id", "ids", "type", "types"),
        *("max", "min", "num", "per", "count", "budget", "limit", "length"),
    )
)
# Before `pass`, one of these says that it is a round, and none says that it opens something.
_ROUND_WORDS = frozenset(
    (
        *("first", "second", "third", "last", "next", "one", "two", "three", "single", "multi"),
        *("forward", "backward", "each", "every", "per", "by", "all", "low", "high", "band"),
    )
)
# Bounded where a run of letters could be read from each of its letters to its end, which for
# a long text would take minutes. A group is what opens something even without the rest.
_CREDENTIAL = re.compile(
    "|".join(
        (
            r"(?<![A-Za-z0-9])(?:"
            + "|".join(
                (
                    r"sk-(?=[\w-]{0,200}[A-Z0-9])[\w-]{16,}",  # OpenAI, Anthropic
                    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
                    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # Amazon
                    r"gh[opsur]_[A-Za-z0-9]{16,}",  # GitHub
                    r"github_pat_\w{16,}",
                    r"glpat-[\w-]{16,}",  # GitLab
                    r"xox[a-z]-[A-Za-z0-9-]{10,}",  # Slack
                    r"AIza[\w-]{30,}",  # Google
                    r"eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]*",  # a JSON web token
                    r"[Bb]earer\s+([\w.~+/=-]{8,})",
                )
            )
            + ")",
            r"-----BEGIN [A-Z0-9 ]{1,60}-----(?s:.*?-----END [A-Z0-9 ]{1,60}-----|.*)",
            r"://[^\s/?#:@]*:([^\s/?#]*)@",  # user:password@ in a URL
            r"(?i:[?&;](?:api_?key|access_?token|token|secret|password|passwd|pass|pwd|signature)=([^&;\s]+))",
        )
    ),
    re.ASCII,
)


def redacted(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every secret, at any depth, is `[redacted]`; all else is as it was."""
    return {key: concealed((key,), value) for key, value in data.items()}


def hidden_keys(data: Mapping[str, Any]) -> list[str]:
    """The dotted names of what `redacted` hides, or of what it hid in `data` before."""
    return [".".join(map(str, loc)) for loc, _ in secrets_in(data)]


def concealed(loc: Loc, value: Any) -> Any:
    """A value as it may be shown, which stands at `loc`."""
    if _is_secret_at(loc, value):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: concealed((*loc, key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [concealed((*loc, index), entry) for index, entry in enumerate(value)]
        return inner if isinstance(value, list) else tuple(inner)
    return value


def secrets_in(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Every secret with the place where it stands, in order."""
    if _is_secret_at(loc, value):
        yield loc, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_in(inner, (*loc, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets_in(inner, (*loc, index))


def scrubbed(text: str, data: Any) -> str:
    """A message about `data`, without the secrets that it quotes, in whole or cut short."""
    secrets = {str(leaf) for _, secret in secrets_in(data) for leaf in _leaves(secret)}
    forms = {form for secret in secrets - {REDACTED} for form in _forms(secret)}
    known = sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True)
    if known:  # at once, so that none is looked for in the mark of another
        text = re.sub("|".join(map(re.escape, known)), REDACTED, text)
    for form in known:
        text = _without_cut(text, form)
    return _CREDENTIAL.sub(REDACTED, text)


def _forms(secret: str) -> Iterator[str]:
    """How a message may quote a secret: as it is, on one line, escaped, or a part of it."""
    yield from (secret, " ".join(secret.split()), repr(secret)[1:-1], json.dumps(secret)[1:-1])
    yield from map(str.strip, secret.splitlines())
    for match in _CREDENTIAL.finditer(secret):
        yield from filter(None, match.groups())


def _without_cut(text: str, secret: str) -> str:
    """Take out what stands of a secret before an ellipsis."""
    head, *tails = text.split("…")
    for tail in tails:
        for length in range(min(len(secret), len(head)), _SHORTEST - 1, -1):
            if head.endswith(secret[:length]):
                head = head[:-length] + REDACTED
                break
        head += f"…{tail}"
    return head


def looks_secret(text: str) -> bool:
    """Whether a text holds what is known to be the form of a credential."""
    return _CREDENTIAL.search(text) is not None


def names_secret(key: str) -> bool:
    """Whether what stands under this key is a secret, whatever it looks like."""
    words = _words(key)
    return not _SECRET_WORDS.isdisjoint(words) or any(
        second in _KEY and first in _KEY_OF for first, second in pairwise(words)
    )


def names_token(key: str) -> bool:
    """Whether the key speaks of a text that opens something: a token, not of a text, or a pass.

    A pass is one at the end of a name: `db_pass`, and not `pass_rate` or `first_pass`.
    """
    words = _words(key)
    if words[-1:] == ["pass"]:
        return _ROUND_WORDS.isdisjoint(words)
    return "token" in words and _TEXT_WORDS.isdisjoint(words)


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(key)]


def _is_secret_at(loc: Loc, value: Any) -> bool:
    if isinstance(value, str) and (value == REDACTED or looks_secret(value)):
        return True
    # Without a value there is nothing to hide, and a flag hides nothing.
    if not loc or value is None or isinstance(value, bool) or value in ("", [], (), {}):
        return False
    names = [part for part in loc if isinstance(part, str)]
    if any(map(names_secret, names)):
        return True
    # A number is neither a token nor a pass: `train_token_s`, `cost_of_token`.
    return any(map(names_token, names)) and any(isinstance(leaf, str) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
