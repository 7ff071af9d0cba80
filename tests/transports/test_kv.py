"""KV on its way: there once, whole or not at all."""

import os
from pathlib import Path

import pytest

from dora_rl.transports.kv.shared_directory import KvDirectory


def test_what_is_put_is_taken_once(tmp_path: Path) -> None:
    source, target = KvDirectory(tmp_path), KvDirectory(tmp_path)
    source.put(3, b"kv")
    source.put(4, b"other")
    assert target.take(3) == b"kv"
    with pytest.raises(FileNotFoundError):
        target.take(3)
    source.discard(4)
    source.discard(4)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_put_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    kv = KvDirectory(tmp_path)
    with pytest.raises(OSError, match="no space"):
        kv.put(3, b"kv")
    assert not list(tmp_path.iterdir())
