"""Chat templates as models bring them: Jinja, rendered in a sandbox.

A template comes with a model, from whoever made it. It may compute text and do nothing else.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from dora_rl.tasks.errors import TaskError

_CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training masks: here, just text."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(self, source: str, tokens: dict[str, str], where: str) -> None:
        self.source = source
        self._tokens = tokens
        self._where = where
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _to_json
        # No `strftime_now`: a prompt must not depend on the day. Templates have a fallback.
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TaskError(f"the chat template of {where} is broken: {error}.") from None

    def render(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str:
        """The messages as the model reads them, up to where it is to write if `generate`."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generate, **self._tokens
            )
        except Exception as error:  # a template may raise what Python's operators do
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TaskError(
                f"the chat template of {self._where} refuses messages of roles {roles}: {error}. "
                "Change the messages, or set task.chat = never."
            ) from None


def load_template(directory: str | Path) -> ChatTemplate | None:
    """The chat template of a model directory, if it has one."""
    directory = Path(directory)
    config = _read_json(directory / _CONFIG)
    source: Any = config.get("chat_template")
    if isinstance(source, list):
        named = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}
        source = named.get("default")
    alone = directory / "chat_template.jinja"
    if alone.is_file():
        source = alone.read_text(encoding="utf-8")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TaskError(f"chat_template of `{directory / _CONFIG}` is not text. Copy it again.")
    return ChatTemplate(source, special_tokens(directory), f"`{directory}`")


def special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens by their roles, such as `eos_token`."""
    found = {}
    for file in ("special_tokens_map.json", _CONFIG):
        for role, token in _read_json(directory / file).items():
            text = token.get("content") if isinstance(token, dict) else token
            if role in _SPECIAL and isinstance(text, str):
                found[role] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"cannot read `{path}`: {error}. Copy the file again.") from None
    if not isinstance(content, dict):
        raise TaskError(f"not a JSON object: `{path}`. Copy the file again.")
    return content


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    del options  # of separators and the like; what a model was trained on has the plain form
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
