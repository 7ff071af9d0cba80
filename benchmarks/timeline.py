"""The picture of the README: two paradigms on the same drawn lengths, as an SVG.

    python benchmarks/timeline.py docs/timeline.svg

One lane per instance, filled as high as its slots are busy and coloured by version; below, the
trainer. Everything is read off a simulation of the default scenario, made smaller.
"""

import sys
from itertools import pairwise
from pathlib import Path

from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.scenarios import load_scenario
from dora_rl.simulator.simulate import simulate
from dora_rl.simulator.usage import Timeline

SMALLER = (
    "cluster.devices=16",
    "cluster.train_devices=8",
    "orchestration.groups_per_step=32",
    "run.steps=8",
    "scenario.warmup_steps=1",
)
PARADIGMS = (ParadigmName.SYNC, ParadigmName.MULTI_VERSION)
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948")
WINDOW_S = 1080.0
WIDTH, LANE, GAP, LEFT = 860, 13, 2, 96


def timeline(paradigm: ParadigmName) -> tuple[Timeline, int]:
    scenario = load_scenario("default", SMALLER)
    recorder = Timeline()
    simulate(scenario, paradigm, recorder=recorder)
    return recorder, scenario.setup(paradigm).params.slots


def draw(paradigm: ParadigmName, top: int, out: list[str]) -> int:
    """Append one paradigm's lanes; returns where the next may begin."""
    recorder, slots = timeline(paradigm)
    lanes = sorted({instance for _, instance, _, _ in recorder.changes})
    out.append(f'<text x="0" y="{top + 11}" class="name">{paradigm}</text>')
    for row, lane in enumerate(lanes):
        y = top + 18 + row * (LANE + GAP)
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}" class="lane"/>')
        changes = [(t, busy, v) for t, i, busy, v in recorder.changes if i == lane]
        changes.append((WINDOW_S, 0, None))
        for (start, busy, version), (end, _, _) in pairwise(changes):
            if busy and version is not None and start < WINDOW_S:
                height = LANE * min(1.0, busy / slots)
                out.append(bar(start, end, y + LANE - height, height, version))
    y = top + 18 + len(lanes) * (LANE + GAP) + 4
    out.append(f'<text x="0" y="{y + 10}">trainer</text>')
    out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}" class="lane"/>')
    for span in recorder.spans:
        if span.kind == "train" and span.start < WINDOW_S:
            out.append(bar(span.start, span.end, y, LANE, span.version + 1))
    out.append(f'<text x="0" y="{top + 18 + 10}">instances</text>')
    return y + LANE + 16


def bar(start: float, end: float, y: float, height: float, version: int) -> str:
    scale = WIDTH / WINDOW_S
    x, width = LEFT + start * scale, (min(end, WINDOW_S) - start) * scale
    colour = COLOURS[version % len(COLOURS)]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"/>'
    )


def main() -> None:
    out: list[str] = []
    top = 4
    for paradigm in PARADIGMS:
        top = draw(paradigm, top, out)
    out.append(
        f'<text x="{LEFT}" y="{top + 4}">time, {WINDOW_S / 60:.0f} minutes; '
        "colour is the policy version, height the busy slots; a train step has the colour "
        "of the version it makes</text>"
    )
    style = (
        "text{font:11px sans-serif;fill:#777}.name{font-weight:bold;font-size:13px}"
        ".lane{fill:#8883}"
    )
    Path(sys.argv[1]).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH} {top + 12}" '
        f'role="img"><title>Busy slots of each instance over time</title><style>{style}</style>'
        + "".join(out)
        + "</svg>\n"
    )


if __name__ == "__main__":
    main()
