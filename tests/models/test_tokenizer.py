"""Tokens and text, and stop strings held against the definition: all text, decoded anew."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from dora_rl.models.errors import ModelError
from dora_rl.models.tokenizer import StopStrings, Tokenizer, load_tokenizer
from tests.models.random_models import TEXT, make_tokenizer

END = "<|end|>"
PIECES = ["a", "b", "▁", "▁a", "▁▁", "ab", "é", "🦊", "��", "##a", "</", "s>", "▁the", "<0xZZ>"]
SOME_BYTES = [0x41, 0x20, 0xC3, 0xA9, 0xF0, 0x9F, 0xA6, 0x8A, 0x80, 0xFF]


def pieces(decoder: Any) -> tokenizers.Tokenizer:
    """Tokens by hand, as SentencePiece has them: pieces and single bytes."""
    names = [END, *PIECES, *(f"<0x{byte:02X}>" for byte in SOME_BYTES)]
    inner = tokenizers.Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=END)
    )
    inner.add_special_tokens([END])
    if decoder is not None:
        inner.decoder = decoder
    return inner


def llama2() -> Any:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def swapping() -> Any:
    """A decoder that rewrites across tokens; no part of a text stands by itself."""
    return decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])


BYTE_LEVEL = make_tokenizer()
KINDS = {
    "byte-level": BYTE_LEVEL,
    "sentencepiece": pieces(llama2()),
    "bytes": pieces(decoders.ByteFallback()),
    "spaces": pieces(None),
    "wordpiece": pieces(decoders.WordPiece("##")),
    "metaspace": pieces(decoders.Metaspace("▁")),
    "swapping": pieces(swapping()),
}
TEXTS = [TEXT[:20], " fox", "🦊", "🐕‍🦺", "狐狸", "naïve", "</answer>", "\n\n"]
LOCAL = ["byte-level", "sentencepiece", "bytes", "spaces"]


def ids_of(*tokens: str) -> list[int]:
    """Their ids, in a tokenizer made of `pieces`."""
    ids = [KINDS["sentencepiece"].token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def first_stop(stops: list[str], tokens: list[int], inner: tokenizers.Tokenizer) -> int | None:
    """The definition: how many tokens there are when a stop string stands in their text."""
    for count in range(1, len(tokens) + 1):
        text = inner.decode(tokens[:count], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return count
    return None


@st.composite
def tokens_and_stops(draw: st.DrawFn, kind: str) -> tuple[list[int], list[str]]:
    """Tokens, of few kinds or of real text, and stop strings that seem to be in it."""
    inner = KINDS[kind]
    token = st.integers(0, inner.get_vocab_size())  # a model may have more than the tokenizer
    last = inner.get_vocab_size() - 1
    token |= st.integers(last + 1 - len(SOME_BYTES), last)  # single bytes, but for byte-level
    few = draw(st.lists(token, min_size=1, max_size=5))
    run = st.lists(st.sampled_from(few), min_size=1, max_size=12)
    if kind == "byte-level":
        run |= st.sampled_from(TEXTS).map(lambda text: inner.encode(text).ids)
    tokens = [token for part in draw(st.lists(run, min_size=1, max_size=4)) for token in part]
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        # What all tokens say, or what a wrong cut would make them say.
        text = inner.decode(tokens[draw(st.just(0) | st.integers(0, len(tokens))) :])
        begin, length = draw(st.integers(0, max(len(text) - 1, 0))), draw(st.integers(1, 6))
        stops.append(text[begin : begin + length] or draw(st.sampled_from("� aé🦊")))
    return tokens, stops


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=200)
@given(st.data())
def test_a_stop_string_is_found_when_it_is_complete(kind: str, data: st.DataObject) -> None:
    tokens, stops = data.draw(tokens_and_stops(kind))
    finder = StopStrings(stops, Tokenizer(KINDS[kind]))
    expected = first_stop(stops, tokens, KINDS[kind])
    asked = range(len(tokens) + 1 if expected is None else expected + 1)
    assert [count for count in asked if finder.completed(tokens[:count])] == (
        [] if expected is None else [expected]
    )


def test_an_emoji_of_several_tokens_is_found_with_its_last() -> None:
    inner = make_tokenizer(257)  # bytes alone
    tokens = inner.encode("a🦊").ids
    assert len(tokens) == 5
    finder = StopStrings(["🦊"], Tokenizer(inner))
    assert [finder.completed(tokens[:count]) for count in range(6)] == [False] * 5 + [True]


def test_one_bad_byte_spoils_its_run_alone() -> None:
    """SentencePiece decodes bytes by the run: all of it, or nothing."""
    inner = KINDS["sentencepiece"]
    assert inner.decode(ids_of("<0xFF>", "<0x41>", "<0x41>", "a", "<0x41>")) == "���aA"
    finder = StopStrings(["A"], Tokenizer(inner))
    tokens = ids_of("<0xFF>", "<0x41>", "<0x41>", "<0x41>", "a")
    assert not any(finder.completed(tokens[:count]) for count in range(6))
    assert finder.completed([*tokens, *ids_of("<0x41>")])


@pytest.mark.parametrize("kind", LOCAL)
def test_only_the_end_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    tokens = BYTE_LEVEL.encode(TEXT).ids * 20 if kind == "byte-level" else [1, 2, 6, 7] * 500
    lengths: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda part: (lengths.append(len(part)), decode(part))[1]
    )
    finder = StopStrings(["x" * 12, "nowhere"], tokenizer)
    assert not any(finder.completed(tokens[:count]) for count in range(1900, 2000))
    assert max(lengths) <= 4 * 14  # a character has at most four tokens, each a byte


def test_no_stops_and_no_tokens() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    assert not StopStrings([], tokenizer).completed([5])
    assert not StopStrings(["a"], tokenizer).completed([])


@given(st.text(max_size=30))
def test_text_survives_the_way_there_and_back(text: str) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text.replace(END, "")
    assert tokenizer.decode([*tokens, 0]) == tokenizer.decode(tokens)  # 0 is special


def test_special_tokens_are_added_where_the_file_says_so() -> None:
    inner = make_tokenizer()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    tokenizer = Tokenizer(inner)
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert plain and 0 not in plain
    assert tokenizer.encode("fox") == [0, *plain]


def test_a_file_is_loaded_and_cuts_no_prompt(tmp_path: Path) -> None:
    inner = make_tokenizer()
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for text in ("a", TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_a_directory_may_have_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(ModelError, match=r"not a tokenizer: `.*tokenizer.json`: .*Copy"):
        load_tokenizer(tmp_path)


def test_only_known_decoders_are_taken_apart() -> None:
    parts = {kind for kind, inner in KINDS.items() if Tokenizer(inner).own_chars(1)}
    assert parts == set(LOCAL)
    # Its last character comes and goes. (The library itself fails on a text of nothing else.)
    stripping = pieces(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]))
    assert Tokenizer(stripping).own_chars(1) == 0


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("sentencepiece", "▁the", 3),  # the space is lost at the start of a text
        ("sentencepiece", "▁", 0),
        ("sentencepiece", "<0x41>", 0),
        ("sentencepiece", END, 0),
        ("spaces", "ab", 2),
        ("byte-level", "a", 1),
        ("byte-level", "ð", 0),  # the first byte of an emoji
    ],
)
def test_characters_of_its_own(kind: str, name: str, expected: int) -> None:
    token = KINDS[kind].token_to_id(name)
    assert Tokenizer(KINDS[kind]).own_chars(token) == expected
    assert Tokenizer(KINDS[kind]).own_chars(10_000) == 0
