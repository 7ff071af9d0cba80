"""Messages come out as they went in, however the bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.framing import Frames, frame

LARGEST = 64
Contents = st.lists(st.binary(max_size=LARGEST), max_size=8)


@given(Contents, st.data())
def test_any_split_gives_the_same_messages(contents: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, contents))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    frames = Frames(LARGEST)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.feed(stream[start:end])
    assert found == contents


@given(Contents)
def test_a_message_is_given_with_its_last_byte(contents: list[bytes]) -> None:
    frames = Frames(LARGEST)
    for content in contents:
        *head, last = (bytes([byte]) for byte in frame(content))
        assert [frames.feed(byte) for byte in head] == [[]] * len(head)
        assert frames.feed(last) == [content]


@given(st.integers(LARGEST + 1, 2**64 - 1), Contents, st.binary(max_size=4))
def test_too_long_is_refused_before_it_is_read(
    length: int, before: list[bytes], rest: bytes
) -> None:
    frames = Frames(LARGEST)
    assert frames.feed(b"".join(map(frame, before))) == before
    with pytest.raises(ValueError, match=rf"{length} bytes; {LARGEST} are the most"):
        frames.feed(length.to_bytes(8, "little") + rest)


def test_the_largest_passes() -> None:
    content = bytes(LARGEST)
    assert Frames(LARGEST).feed(frame(content)) == [content]
    with pytest.raises(ValueError, match="65 bytes"):
        Frames(LARGEST).feed(frame(content + b"x"))
