"""`samples.jsonl`: some of what the policy wrote in every step, with what it got for it.

A listener. Lines are in the order of steps; a resume keeps those of the steps that it does not take
again, so that no step is there twice and no line is torn.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.records.reward_log import printable
from dora_rl.samples import SampleRef, unpack
from dora_rl.store.durable_files import replace_file
from dora_rl.store.rundir import SAMPLES, RunDirectory
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples import SampleSource

_LONGEST = 4000  # characters of a prompt or a response that are kept: of both its ends
_MOST_PARTS = 32  # a reward may name any number
_SHOWN = 300  # characters of each on a terminal
_log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that a step was trained on."""

    step: int
    """Counted from 1, as in `metrics.jsonl`."""
    trajectory: int
    group: int
    version: int
    """The oldest that sampled of it; but for `partial` and `in_flight`, the only one."""
    staleness: int
    reward: float
    reward_parts: dict[str, float]
    tokens: int
    """Sampled ones."""
    truncated: bool
    prompt: str
    response: str


def sampled(
    report: ms.Trained,
    samples: Sequence[SampleRef],
    count: int,
    source: SampleSource,
    decode: Decode,
) -> list[SampleRecord]:
    """So many of a step's samples; the step alone says which, so that a resume takes the same."""
    chosen = random.Random(report.step).sample(range(len(samples)), min(count, len(samples)))
    records = []
    for place in sorted(chosen):
        try:
            records.append(_record(report.step, samples[place], source, decode))
        except RecordLost as error:
            _log.warning("a sample of step %d is left out: %s", report.step + 1, error)
    return records


def _record(step: int, sample: SampleRef, source: SampleSource, decode: Decode) -> SampleRecord:
    trajectory = unpack(source.get(sample.trajectory.content))
    version = min((s.version for s in trajectory.segments), default=trajectory.version)
    return SampleRecord(
        step=step + 1,
        trajectory=trajectory.id,
        group=trajectory.group,
        version=version,
        staleness=step - version,
        reward=sample.reward,
        reward_parts=dict(sorted(sample.parts.items())[:_MOST_PARTS]),
        tokens=trajectory.num_sampled,
        truncated=trajectory.truncated,
        prompt=_ends(decode(trajectory.prompt), _LONGEST),
        response=_ends(decode(trajectory.tokens), _LONGEST),
    )


def sample_lines(record: SampleRecord) -> list[str]:
    """A sample on a terminal: as many lines whatever it holds, and nothing that steers it."""
    parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts.items())
    cut = ", truncated" if record.truncated else ""
    return [
        f"sample of step {record.step}  reward {record.reward:.3f} ({_shown(parts, 120)})  "
        f"version {record.version}  staleness {record.staleness}  {record.tokens} tokens{cut}",
        f"  prompt    {_shown(record.prompt, _SHOWN)}",
        f"  response  {_shown(record.response, _SHOWN)}",
    ]


def _shown(text: str, longest: int) -> str:
    return printable(_ends(text, longest)).replace("\n", "\\n").replace("\t", "\\t")


def _ends(text: str, longest: int) -> str:
    """A text of bounded length: its beginning and its end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


class SampleLog(Listener):
    """Writes the samples of one run."""

    def __init__(self, count: int, source: SampleSource, decode: Decode) -> None:
        """`count` of each step; 0: none, and no file."""
        self._count = count
        self._source = source
        self._decode = decode
        self._file: TextIO | None = None

    def write_to(self, file: TextIO) -> None:
        self._file = file

    def trained(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> None:
        if self._file is None or not self._count:
            return
        for record in sampled(report, samples, self._count, self._source, self._decode):
            self._file.write(json.dumps(msgspec.to_builtins(record)) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()


def keep_up_to(directory: RunDirectory, step: int) -> None:
    """Drop what was written of later steps, and lines that are not whole."""
    path = directory.path / SAMPLES
    if not path.is_file():
        return
    replace_file(path, (line for line, number in _whole_lines(path) if number <= step))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines with the steps that they are of."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                content: Any = json.loads(line)
                number = content["step"]
                if line.endswith(b"\n") and isinstance(number, int):
                    yield line, number
