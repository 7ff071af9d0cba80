"""No secret of a configuration is saved or shown, and nothing else is touched."""

import copy
import json
import string
import time
import tomllib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from dora_rl.config import ConfigModel, apply_overrides, dump_toml, validate
from dora_rl.config.redaction import REDACTED, hidden_keys, looks_secret, redacted, scrubbed
from dora_rl.core.protocol.errors import UserError

SECRET_KEYS = [
    *("api_key", "apiKey", "API-KEY", "apikey", "openai_api_key", "x-api-key", "APIKey"),
    *("token", "hf_token", "HF_TOKEN", "accessToken", "token_file"),
    *("secret", "client_secret", "aws_secret_access_key", "secrets", "SECRET"),
    *("password", "db_password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "gcp-credentials", "authorization", "Authorization"),
    *("pass", "PASS", "db_pass", "smtpPass", "passcode"),
    *("private_key", "privateKey", "ssh_key", "access_key", "signing_keys"),
]
PLAIN_KEYS = [
    *("max_tokens", "stop_token_ids", "tokenizer", "kv_budget_tokens", "keep_checkpoints"),
    *("eos_token", "bos_token", "pad_token_id", "special_token", "tokens", "num_tokens"),
    *("prompt_key", "answer_key", "key", "keys", "keyboard", "monkey", "secretary_name"),
    *("pass_rate", "pass_at_k", "first_pass", "two-pass", "forwardPass", "passed", "passing"),
    *("author", "authored", "passes", "credits", "path", "out", "steps", "tokenize", "detoken"),
]
CREDENTIALS = [
    "sk-proj-abcDEF0123456789abcdef",
    "sk-ant-api03-abcdefghijklmnopqrst",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0123456789_abcdef",
    "xoxb-123456789012-abcdefghij",
    "glpat-abcdefghij0123456789",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nMIIEow",
    "https://user:hunter2hunter2@example.org/x",
    "postgresql://me:pa55word@db:5432/runs",
    "Bearer abcdefgh12345678",
    "https://example.org/x?api_key=abcdefgh",
    "https://example.org/x?user=me&pass=abcdefgh",
]
INNOCENT = [
    *("task-1234567890abcdef", "risk-assessment-of-1000-things", "sk-learn-datasets-iris"),
    *("hf:openai/gsm8k:train", "https://example.org:8080/a@b", "http://localhost:80/"),
    *("module:function", "a@b.org", "user:password", "AKIA", "ghp_", "sk-", "hf_", "xoxb-"),
    *("-----BEGIN", "</s>", "runs/2026-01-01", "gym:chain_sum", "HF_TOKEN", "bearer of news"),
]

names = st.sampled_from(PLAIN_KEYS) | st.text("abcxyz", min_size=1, max_size=3)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(allow_nan=False)
    | st.sampled_from(INNOCENT)
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(names, plain, max_size=4)
needles = st.text(string.ascii_letters + string.digits, min_size=12, max_size=20).map(
    lambda text: f"needle{text}"
)


@st.composite
def planted(draw: st.DrawFn) -> tuple[dict[str, Any], str, str]:
    """A configuration with a secret somewhere in it, the secret, and its dotted name."""
    data = draw(tables)
    needle = draw(needles)
    form = draw(st.sampled_from(["key", "table", "list", "value"]))
    if form == "value":
        key, value = "harmless", f"https://me:{needle}@example.org"
    else:
        key = draw(st.sampled_from(SECRET_KEYS))
        value = {"key": needle, "table": {"x": [needle]}, "list": [needle, 1]}[form]
    name = key
    found: Any = {**draw(tables), key: value}
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            found, name = [draw(scalars), found], f"1.{name}"
        else:
            outer = draw(st.sampled_from(["task", "options", "reward"]))
            found, name = {**draw(tables), outer: found}, f"{outer}.{name}"
    return {**data, "root": found}, needle, f"root.{name}"


@given(planted())
def test_no_secret_survives_and_its_place_is_told(case: tuple[dict[str, Any], str, str]) -> None:
    data, needle, name = case
    before = copy.deepcopy(data)
    safe = redacted(data)
    assert needle not in json.dumps(safe)
    assert hidden_keys(data) == [name]
    assert data == before
    assert redacted(safe) == safe
    assert hidden_keys(safe) == [name]


@given(tables)
def test_what_is_no_secret_is_untouched(data: dict[str, Any]) -> None:
    safe = redacted(data)
    assert safe == data
    assert json.dumps(safe) == json.dumps(data)
    assert hidden_keys(data) == []


@given(planted())
def test_only_the_secret_is_changed(case: tuple[dict[str, Any], str, str]) -> None:
    data, _, name = case

    def without(value: Any, path: list[str]) -> Any:
        """The tree with the secret put out by hand."""
        if not path:
            return REDACTED
        if isinstance(value, list):
            return [without(v, path[1:]) if str(i) == path[0] else v for i, v in enumerate(value)]
        return {**value, path[0]: without(value[path[0]], path[1:])}

    assert redacted(data) == without(data, name.split("."))


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_keys_of_secrets(key: str) -> None:
    assert redacted({key: "x"}) == {key: REDACTED}
    assert hidden_keys({"task": {"options": {key: "x"}}}) == [f"task.options.{key}"]


@pytest.mark.parametrize("key", PLAIN_KEYS)
@pytest.mark.parametrize("value", ["x", 3, ["x"], [3], {"y": "x"}])
def test_keys_of_other_things(key: str, value: Any) -> None:
    assert redacted({key: value}) == {key: value}


@pytest.mark.parametrize("value", CREDENTIALS)
@pytest.mark.parametrize("around", ["{}", " {}\n", "['{}']", "key={}"])
def test_credentials_are_known_by_their_look(value: str, around: str) -> None:
    text = around.format(value)
    assert redacted({"harmless": [text]}) == {"harmless": [REDACTED]}
    assert hidden_keys({"a": ({"b": text},)}) == ["a.0.b"]


@pytest.mark.parametrize("value", INNOCENT)
def test_what_only_resembles_one_is_kept(value: str) -> None:
    assert redacted({"harmless": value}) == {"harmless": value}


@pytest.mark.parametrize("value", [None, "", True, False, [], {}])
def test_where_there_is_nothing_there_is_nothing_to_hide(value: Any) -> None:
    assert redacted({"api_key": value}) == {"api_key": value}


def test_numbers_may_be_secrets_but_no_tokens() -> None:
    data = {"password": 12345, "train_token_s": 0.1, "token": 7, "pass": 3, "costs": (1, 2)}
    assert redacted(data) == {**data, "password": REDACTED}


@given(planted())
def test_a_message_does_not_quote_a_secret(case: tuple[dict[str, Any], str, str]) -> None:
    data, needle, _ = case
    assert needle not in scrubbed(f"reward must be short: `{needle}` and {data}", data)


SPACED = 'correct  horse\n"battery" \\staple'


@pytest.mark.parametrize(
    "quoted",
    [
        SPACED,
        " ".join(SPACED.split()),
        repr(SPACED),
        json.dumps(SPACED),
        "correct  horse",
        f"{SPACED[:20]}…",
        f"{SPACED[:6]}…` and `{SPACED[:9]}…",
    ],
)
def test_a_quoted_secret_is_found_in_every_form(quoted: str) -> None:
    text = scrubbed(f"a: `{quoted}`. Fix it… now.", {"password": SPACED})
    assert text.startswith("a: `") and text.endswith("`. Fix it… now.")
    assert REDACTED in text
    assert not [word for word in ("corr", "horse", "battery", "staple") if word in text]


@pytest.mark.parametrize("value", CREDENTIALS)
def test_no_part_of_a_credential_is_left_on_one_line(value: str) -> None:
    """A check quotes what was put on one line, or what is no longer the whole."""
    text = " ".join(f"mode is wrong: {value}".split())
    for data in ({}, {"harmless": value}):
        safe = scrubbed(text, data)
        assert safe.startswith("mode is wrong: ") and REDACTED in safe
        assert not looks_secret(safe)
        for piece in ("MIIEow", "hunter2", "pa55word", "abcdef", "IOSFODNN", "1234"):
            assert piece not in safe


def test_of_two_secrets_none_spoils_the_mark_of_the_other() -> None:
    data = {"password": "redacted", "secret": "other-secret"}
    assert scrubbed("other-secret, redacted.", data) == f"{REDACTED}, {REDACTED}."


@pytest.mark.parametrize("piece", ["a", "sk-", "eyJ-", "://:", "-----BEGIN A", "bearer ", "?token"])
def test_a_long_text_is_read_in_no_time(piece: str) -> None:
    """A text may be a whole prompt or an encoded picture; letters alone once took minutes."""
    started = time.process_time()
    looks_secret(piece * (200_000 // len(piece)))
    assert time.process_time() - started < 5


# --- saving


class Whole(ConfigModel):
    name: str = "run"
    api_key: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Plain:
    token: str = "needle"
    max_tokens: int = 5


@given(st.sampled_from(SECRET_KEYS), needles, st.booleans())
def test_a_configuration_is_saved_without_its_secrets(key: str, needle: str, deep: bool) -> None:
    options: dict[str, Any] = {key: needle, "url": f"https://me:{needle}@example.org", "steps": 3}
    whole = Whole(api_key=987654, options={"list": [options]} if deep else options)
    text = dump_toml(whole, hide_secrets=True)
    assert needle not in text and "987654" not in text
    saved = tomllib.loads(text)
    assert saved == redacted(tomllib.loads(dump_toml(whole)))
    assert len(hidden_keys(saved)) == 3
    inner = saved["options"]["list"][0] if deep else saved["options"]
    assert inner == {key: REDACTED, "url": REDACTED, "steps": 3}
    assert whole.options in (options, {"list": [options]})


def test_secrets_are_saved_unless_asked_not_to() -> None:
    assert tomllib.loads(dump_toml(Plain())) == {"token": "needle", "max_tokens": 5}
    hidden = tomllib.loads(dump_toml(Plain(), hide_secrets=True))
    assert hidden == {"token": REDACTED, "max_tokens": 5}


@given(st.dictionaries(names, st.integers() | st.sampled_from(INNOCENT), max_size=4))
def test_without_secrets_the_saved_text_is_the_same(options: dict[str, Any]) -> None:
    whole = Whole(options=options)
    assert dump_toml(whole, hide_secrets=True) == dump_toml(whole)


# --- messages


class Options(ConfigModel):
    api_key: int = 0
    password: str = ""
    mode: str = Field(default="a", pattern="^[a-z]$")
    count: int = 1
    extra: dict[str, int] = Field(default_factory=dict)

    @field_validator("password")
    @classmethod
    def _own(cls, password: str) -> str:
        if len(password) > 3:
            raise ValueError(f"password must be short: `{password}`. Cut it.")
        return password


class Task(ConfigModel):
    options: Options = Options()


NEEDLE = "needle-in-a-haystack"


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": NEEDLE},
        {"api_key": [NEEDLE]},
        {"api_key": {"deep": NEEDLE}},
        {"password": NEEDLE},
        {"count": {"password": NEEDLE}},
        {"count": f"https://me:{NEEDLE}@example.org"},
        {"mode": f"sk-{NEEDLE}0123456789"},
        {"mode": f"hf_{'x' * 200}{NEEDLE}"},
        {"extra": {"token": NEEDLE}},
        {"extra": {"secret": {"x": NEEDLE}}},
        {"password": NEEDLE, "count": "x"},
    ],
)
def test_a_refusal_names_the_key_and_not_the_secret(options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        validate(Task, {"options": options}, "my.toml")
    message = str(caught.value)
    assert NEEDLE not in message and NEEDLE[:12] not in message
    assert REDACTED in message
    assert f"options.{next(iter(options))}" in message


class Note(ConfigModel):
    text: str = ""

    @field_validator("text")
    @classmethod
    def _own(cls, text: str) -> str:
        raise ValueError(f"text must be short: `{text}`. Cut it.")


def test_a_check_of_a_model_does_not_quote_a_key_that_fills_lines() -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{NEEDLE}\n-----END PRIVATE KEY-----"
    with pytest.raises(UserError) as caught:
        validate(Note, {"text": key}, "my.toml")
    assert str(caught.value) == f"text must be short: `{REDACTED}`. Cut it."


@pytest.mark.parametrize("depth", [150, 250, 480, 700, 2000, 20_000])
def test_whatever_the_depth_a_refusal_is_one_line(depth: int) -> None:
    value: Any = NEEDLE
    for _ in range(depth):
        value = {"a": value}
    with pytest.raises(UserError) as caught:
        validate(Whole, {"name": 1, "options": {"password": NEEDLE, "deep": value}}, "my.toml")
    message = str(caught.value)
    assert NEEDLE not in message
    assert message == (
        "name must be a string: `1`. The default is `run`."
        if depth < 200
        else "nested too deeply: `my.toml`. Flatten its tables."
    )


def test_a_number_is_not_repeated_as_a_fix() -> None:
    with pytest.raises(UserError) as caught:
        validate(Task, {"options": {"api_key": 1234567.0}}, "my.toml")
    assert "1234567" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        f"api_key.={NEEDLE}",
        f"task..token={NEEDLE}",
        f"--api-key {NEEDLE}",
        f"token={NEEDLE}\0",
        f"a.b.password={NEEDLE}",
        f"a.b=https://me:{NEEDLE}@example.org",
        f"list.9.secret={NEEDLE}",
        f"task..options={{api_key = '{NEEDLE}'}}",
        f"a.b={{max_tokens = 1, token = '{NEEDLE}'}}",
    ],
)
def test_a_refused_override_is_shown_without_its_secret(override: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides({"a": 1, "list": [1]}, [override])
    assert NEEDLE not in str(caught.value)
    assert REDACTED in str(caught.value)
