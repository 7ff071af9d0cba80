"""`samples.jsonl`: what it holds, how much, and what a resume leaves of it."""

import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.types import Segment
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.display.progress import execute_shown
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.sample_log import (
    SampleLog,
    SampleRecord,
    keep_up_to,
    sample_lines,
    sampled,
)
from dora_rl.samples import SampleRef, Trajectory, pack
from dora_rl.store.rundir import SAMPLES, RunDirectory
from dora_rl.transports.samples.memory import SampleMemory
from tests.runtime.harness import PROMPTS, Seen, run, settings

RECORDS = SampleMemory()


def sample(name: int, version: int = 0, **fields: Any) -> SampleRef:
    trajectory = Trajectory(
        id=name,
        group=name // 2,
        version=version,
        prompt=(1,),
        tokens=(2, 3),
        logprobs=(0.0, 0.0),
        segments=(Segment(version, "d", 2),),
        truncated=False,
    )
    content = RECORDS.put(pack(trajectory))
    return SampleRef(trajectory=trajectory.by_reference(content), reward=0.5, **fields)


def trained(step: int) -> ms.Trained:
    return ms.Trained(step, 0, 1.0, {})


def words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_a_step_has_so_many_and_the_same_each_time() -> None:
    batch = [sample(name, version=3, parts={"a": 1.0}) for name in range(20)]
    records = sampled(trained(4), batch, 6, RECORDS, words)
    assert records == sampled(trained(4), batch, 6, RECORDS, words)
    assert len({record.trajectory for record in records}) == 6
    assert records[0] == SampleRecord(
        step=5,
        trajectory=records[0].trajectory,
        group=records[0].trajectory // 2,
        version=3,
        staleness=1,
        reward=0.5,
        reward_parts={"a": 1.0},
        tokens=2,
        truncated=False,
        prompt="1",
        response="2 3",
    )
    assert len(sampled(trained(4), batch, 100, RECORDS, words)) == 20


def test_a_sample_that_is_lost_is_left_out() -> None:
    good, lost = sample(0), sample(1)
    content = lost.trajectory.content._replace(offset=10**6)
    trajectory = msgspec.structs.replace(lost.trajectory, content=content)
    batch = [good, msgspec.structs.replace(lost, trajectory=trajectory)]
    (record,) = sampled(trained(0), batch, 2, RECORDS, words)
    assert record.trajectory == 0


texts = st.text(max_size=50) | st.text(max_size=5).map(lambda text: text * 3000)


@given(texts, texts, st.dictionaries(texts, st.floats(allow_nan=False), max_size=5))
def test_whatever_is_written_a_line_is_bounded_and_a_terminal_is_not_steered(
    prompt: str, response: str, parts: dict[str, float]
) -> None:
    decoded = iter((prompt, response))
    batch = [sample(0, parts=parts)]
    (record,) = sampled(trained(0), batch, 1, RECORDS, lambda tokens: next(decoded))
    lines = sample_lines(record)
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    # An escape takes up to ten characters.
    assert all(len(line) < 10 * 400 for line in lines)
    file = io.StringIO()
    log = SampleLog(1, RECORDS, lambda tokens: response)
    log.write_to(file)
    log.trained(0.0, trained(0), [sample(0)])
    written = file.getvalue()
    assert written.isascii() and written.count("\n") == 1
    assert json.loads(written)["response"] == record.response
    assert len(record.response) <= 4100


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_a_file_cut_anywhere_goes_on_as_if_it_never_was(
    counts: list[int], data: st.DataObject
) -> None:
    def lines(first: int) -> bytes:
        return b"".join(
            json.dumps({"step": step + 1, "response": f"{step} {number}"}).encode() + b"\n"
            for step, count in enumerate(counts)
            if step >= first
            for number in range(count)
        )

    whole = lines(0)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / SAMPLES
        done = data.draw(st.integers(0, len(counts)), label="steps that are not taken again")
        least = len(whole) - len(lines(done))  # was committed with those steps
        cut = data.draw(st.integers(least, len(whole)), label="bytes that reached the file")
        file.write_bytes(whole[:cut])
        keep_up_to(RunDirectory(Path(place)), done)
        file.write_bytes(file.read_bytes() + lines(done))
        assert file.read_bytes() == whole
        assert [path.name for path in Path(place).iterdir()] == [SAMPLES]


def test_a_run_writes_them_by_step(model: Path, tmp_path: Path) -> None:
    seen = Seen(tmp_path / "run")
    run_settings = {"steps": 3, "samples_per_step": 2}
    ended = run(model, tmp_path / "run", seen, run=run_settings)
    records = [json.loads(line) for line in (ended.directory / SAMPLES).read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 1, 2, 2, 3, 3]
    batches = {number + 1: batch for number, batch in enumerate(seen.batches)}
    for record in records:
        (found,) = [s for s in batches[record["step"]] if s.trajectory.id == record["trajectory"]]
        assert record["reward"] == found.reward
        assert record["version"] == found.trajectory.version
        assert record["staleness"] == record["step"] - 1 - record["version"] >= 0
        assert record["prompt"].startswith("the quick ")


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [1, 3]), (10, [1])])
def test_one_is_shown_now_and_then(
    every: int, steps: list[int], model: Path, tmp_path: Path
) -> None:
    config = settings(
        model, tmp_path / "run", run={"steps": 3, "show_sample_every": every, "samples_per_step": 0}
    )
    stream = io.StringIO()
    execute_shown(prepare(read_config(config), prompts=PROMPTS), stream)
    heads = [line for line in stream.getvalue().splitlines() if line.startswith("sample of step")]
    assert [int(head.split()[3]) for head in heads] == steps
    assert stream.getvalue().count("  prompt    the quick ") == len(steps)
    assert not (tmp_path / "run" / SAMPLES).exists()


def test_a_terminal_that_knows_no_such_letters_is_no_matter(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path / "run", run={"steps": 1})
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        rows = [{"prompt": "caf\u00e9 \u732b"}]
        assert execute_shown(prepare(read_config(config), prompts=rows), stream).ok
        shown = raw.getvalue().decode("ascii")
    assert "  prompt    caf" in shown
