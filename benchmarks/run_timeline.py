"""The timeline of a run, from its `trace.json`, as an SVG.

    python benchmarks/run_timeline.py RUN/trace.json OUT.svg CAPTION

As in the picture of the README: one lane per instance, filled as high as its slots are busy and
coloured by version; below, the trainer. What comes before the first trajectory is left out.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from timeline import COLOURS, GAP, LANE, LEFT, WIDTH

FIRST_INSTANCE = 100  # as `observe/timeline.py` numbers them
STYLE = "text{font:11px sans-serif;fill:#777}.lane{fill:#8883}"


class Span(NamedTuple):
    lane: str
    start: float  # microseconds
    end: float
    version: int
    share: float  # of the lane's height


def spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """What instances and the trainer did, from the first trajectory on."""
    running = [e for e in events if e["ph"] == "X" and e["pid"] >= FIRST_INSTANCE]
    slots = max(_busy(e) for e in running)
    begin = min(e["ts"] for e in running)
    found = [
        Span(
            f"instance {e['pid'] - FIRST_INSTANCE}",
            e["ts"],
            e["ts"] + e["dur"],
            _version(e),
            _busy(e) / slots,
        )
        for e in running
    ]
    trained = [e for e in events if e["ph"] == "X" and e["name"].startswith("train ")]
    # A step has the colour of the version that it makes.
    found += [Span("trainer", e["ts"], e["ts"] + e["dur"], _version(e) + 1, 1.0) for e in trained]
    return [s._replace(start=s.start - begin, end=s.end - begin) for s in found if s.end > begin]


def _busy(event: dict[str, Any]) -> float:
    return float(event["args"]["running"])


def _version(event: dict[str, Any]) -> int:
    return int(event["args"]["version"])


def draw(found: Sequence[Span], caption: str) -> Iterator[str]:
    lanes = sorted({span.lane for span in found})
    end = max(span.end for span in found)
    height = len(lanes) * (LANE + GAP) + 24
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH} {height}" role="img">'
        f"<title>{escape(caption)}</title><style>{STYLE}</style>"
    )
    for number, lane in enumerate(lanes):
        top = number * (LANE + GAP)
        yield f'<text x="0" y="{top + 11}">{lane}</text>'
        yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{LANE}" class="lane"/>'
        for span in found:
            if span.lane == lane:
                x, width = LEFT + span.start / end * WIDTH, (span.end - span.start) / end * WIDTH
                tall = span.share * LANE
                yield (
                    f'<rect x="{x:.1f}" y="{top + LANE - tall:.1f}" width="{width:.2f}" '
                    f'height="{tall:.1f}" fill="{COLOURS[span.version % len(COLOURS)]}"/>'
                )
    yield (
        f'<text x="{LEFT}" y="{height - 6}">{escape(caption)}; {end / 1e6:.0f} s; colour is the '
        "policy version, height the busy slots</text></svg>\n"
    )


def main(trace: str, out: str, caption: str) -> None:
    found = spans(json.loads(Path(trace).read_text()))
    Path(out).write_text("".join(draw(found, caption)))


if __name__ == "__main__":
    main(*sys.argv[1:])
