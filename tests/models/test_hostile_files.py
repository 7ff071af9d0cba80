"""A model directory that was made to do harm is refused by file and reason, at no cost."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from dora_rl.core.protocol.errors import UserError
from dora_rl.models import packaged
from dora_rl.models.config import read_config
from dora_rl.models.errors import ModelError
from dora_rl.models.tokenizer import load_tokenizer

TERABYTE = 1 << 40
PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def refused(read: Callable[[], Any], name: str) -> str:
    tracemalloc.start()
    try:
        with pytest.raises((UserError, ValueError)) as caught:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    message.encode()
    assert name in message
    assert len(message) < 1000
    assert peak < 64 << 20
    return message


def sparse(path: Path, head: bytes = b"", size: int = TERABYTE) -> None:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


def test_a_plain_configuration_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert read_config(tmp_path).num_layers == 2


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_of_a_terabyte_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    sparse(tmp_path / name, b"{}")
    message = refused(lambda: read_config(tmp_path), name)
    assert message.startswith(f"`{tmp_path / name}` has more than ")


@pytest.mark.parametrize(
    "key", [key for key, value in PLAIN.items() if isinstance(value, int)] + ["head_dim"]
)
@pytest.mark.parametrize("value", [2**32, 2**63, 10**300])
def test_a_size_that_nobody_could_hold_is_refused(tmp_path: Path, key: str, value: int) -> None:
    """Among them a number of layers that a loop over would never end."""
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, key: value}))
    message = refused(lambda: read_config(tmp_path), "config.json")
    assert message.startswith(f"{key} in ") and "must be <=" in message


def test_the_end_of_a_text_is_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "eos_token_id": [2, 2**40]}))
    assert "eos_token_id" in refused(lambda: read_config(tmp_path), "config.json")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (json.dumps(PLAIN)[:-1] + ', "vocab_size": 3}', "the key `vocab_size` occurs twice"),
        (json.dumps(PLAIN)[:-1] + ', "rope_scaling": {"a": 1, "a": 2}}', "the key `a` occurs"),
        ("{" + '"a":{' * 100_000, "not JSON"),
        (json.dumps(PLAIN)[:-1] + ', "rope_scaling": ' + "[" * 50_000 + "]" * 50_000 + "}", "not"),
        ('{"vocab_size": ' + "9" * 100_000 + "}", "not JSON"),
        ('{"architectures": ["\\ud800"]}', "architectures"),
        ("\0" * 1000, "not JSON"),
        ("\x80\x04cposix\nsystem\n(S'true'\ntR.", "not JSON"),
    ],
    ids=range(8),
)
def test_a_trap_for_the_reader_is_refused(tmp_path: Path, raw: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(raw, encoding="latin-1")
    assert reason in refused(lambda: read_config(tmp_path), "config.json")


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=r"no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"no config.json"):
        read_config(tmp_path)


# --- tokenizers


def test_a_tokenizer_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / "tokenizer.json", b"{}")
    message = refused(lambda: load_tokenizer(tmp_path), "tokenizer.json")
    assert "It is not read" in message


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[["a","zz"]]}}',
        b'{"version":"1.0","model":{"type":"Unigram","unk_id":7,"vocab":[]}}',
        b'{"version":"1.0","added_tokens":[{"id":-1}],"model":{"type":"BPE"}}',
        b'{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"("},'
        b'"behavior":"Isolated","invert":false},"model":{"type":"BPE","vocab":{},"merges":[]}}',
    ],
    ids=range(8),
)
def test_a_tokenizer_that_is_a_trap_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    message = refused(lambda: load_tokenizer(tmp_path), "tokenizer.json")
    assert message.startswith("not a tokenizer")


class Panic(BaseException):
    """As the library's own, which is no Exception."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), MemoryError()])
def test_a_panic_of_the_library_is_a_refusal(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(path: str) -> tokenizers.Tokenizer:
        raise error

    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    monkeypatch.setattr(tokenizers.Tokenizer, "from_file", panic, raising=True)
    assert "not a tokenizer" in refused(lambda: load_tokenizer(tmp_path), "tokenizer.json")


@given(st.data())
def test_a_damaged_tokenizer_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("tokenizer")
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    raw = bytearray(inner.to_str().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (directory / "tokenizer.json").write_bytes(raw)
    try:
        tokenizer = load_tokenizer(directory)
    except ModelError as error:
        assert "tokenizer.json" in str(error)
    else:
        assert tokenizer is not None


# --- weights of a packaged model


@pytest.mark.parametrize(
    ("length", "size", "reason"),
    [
        (2**64 - 1, 100, "the header is cut"),
        (TERABYTE, 2 * TERABYTE, "the header is too long"),
        (100_000_001, TERABYTE, "the header is too long"),
    ],
)
def test_a_header_of_any_length_takes_no_memory(
    tmp_path: Path, length: int, size: int, reason: str
) -> None:
    sparse(tmp_path / "model.safetensors", struct.pack("<Q", length) + b"{}", size)
    path = tmp_path / "model.safetensors"
    assert reason in refused(lambda: packaged.tensor_digest(path), "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, TERABYTE]}}).encode(),
        json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}).encode(),
        b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
    ],
    ids=range(5),
)
def test_a_header_that_lies_has_no_digest(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    refused(lambda: packaged.tensor_digest(path), "model.safetensors")
