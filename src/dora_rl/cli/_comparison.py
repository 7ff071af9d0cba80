"""Summaries of several paradigms side by side: as JSON, as a table, as one sentence."""

from collections.abc import Callable, Mapping
from typing import Any

from dora_rl.observe.metrics import WORTHWHILE, Summary, speedup_over

WIDTH = 100
_BASELINE = "sync"
_OURS = "multi_version"
_PEER = "in_flight"
_THROUGHPUT = "tokens trained per s"
_SPEEDUPS = {"  over sync, by tokens": "by_tokens_per_s", "  over sync, by step": "by_step_time"}

Summaries = Mapping[str, Summary]


def speedup(summaries: Summaries, name: str, over: str = _BASELINE) -> float | None:
    """How many times the tokens a second; None where the other was not run or trained nothing."""
    return speedup_over(summaries[name], summaries.get(over))["by_tokens_per_s"]


def to_json(about: Mapping[str, Any], summaries: Summaries) -> dict[str, Any]:
    """Everything that the same seed reproduces."""
    paradigms = {
        name: summary.to_json()
        | {"speedup_over_sync": speedup_over(summary, summaries.get(_BASELINE))}
        for name, summary in summaries.items()
    }
    ok = all(summary.ok for summary in summaries.values())
    return {**about, "ok": ok, "paradigms": paradigms}


def conclusion(summaries: Summaries) -> str:
    """What the table says, in one sentence."""
    fastest = max(summaries, key=lambda name: summaries[name].tokens_per_s)
    subject = _OURS if _OURS in summaries else fastest
    summary = summaries[subject]
    gain, against_peer = speedup(summaries, subject), speedup(summaries, subject, _PEER)
    kept = (
        f"{summary.mixed} of its trained trajectories mix versions"
        if summary.mixed
        else "each trajectory comes from one version"
    )
    ages = (
        f"staleness is {summary.mean_staleness:.2f} on average, {summary.max_staleness:g} at most"
    )
    if gain is None or subject == _BASELINE:
        return f"{subject} trains {summary.tokens_per_s:,.0f} tokens a second; {kept}, {ages}."
    if gain < WORTHWHILE:
        return (
            f"Asynchrony does not pay here: {subject} trains {gain:.2f} times the tokens of "
            f"{_BASELINE} a second; {kept}, {ages}."
        )
    peer = ""
    if against_peer is not None and subject != _PEER:
        peer = f" and {against_peer:.2f} times those of {_PEER}"
    return (
        f"{subject} trains {gain:.2f} times the tokens of {_BASELINE} a second{peer}; "
        f"{kept}, {ages}."
    )


def print_table(title: str, summaries: Summaries) -> None:
    """Figures as rows, paradigms as columns, then notes and the conclusion."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    table = Table(box=None, pad_edge=False)
    table.add_column("steady state")
    for name in summaries:
        table.add_column(name, justify="right", style="bold" if name == _OURS else "")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(summary) for summary in summaries.values()))
        if label == _THROUGHPUT and _BASELINE in summaries:
            for label, measure in _SPEEDUPS.items():
                base = summaries[_BASELINE]
                gains = [speedup_over(s, base)[measure] for s in summaries.values()]
                table.add_row(label, *("-" if g is None else f"{g:.2f} x" for g in gains))
    verdicts = [
        Text("clean", "green") if summary.audit_ok else Text("BROKEN", "bold red")
        for summary in summaries.values()
    ]
    table.add_row("audit", *verdicts)
    console.print(Text(title, "bold"))
    console.print(table)
    console.print()
    for name, summary in summaries.items():
        for note in _notes(summary):
            console.print(Text(f"{name}: {note}"))
    console.print(Text(conclusion(summaries), "bold"))


def _notes(summary: Summary) -> list[str]:
    notes = []
    if summary.audit != "clean":
        notes.append(summary.audit.removeprefix("clean; "))
    if not summary.ok and summary.audit_ok:
        notes.append(f"the run failed: {summary.end}")
    return notes


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _big(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:g}"


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("step, minutes", lambda s: f"{s.step_minutes:.2f}"),
    (_THROUGHPUT, lambda s: f"{s.tokens_per_s:,.0f}"),
    ("rollout only", lambda s: _share(s.rollout_only_share)),
    ("bubbles", lambda s: _share(s.bubble_share)),
    (
        "staleness mean/p95/max",
        lambda s: f"{s.mean_staleness:.2f}/{s.p95_staleness:g}/{s.max_staleness:g}",
    ),
    ("deadline stalls", lambda s: f"{s.deadline_stalls} ({s.deadline_stall_s:.0f} s)"),
    ("versions live mean/max", lambda s: f"{s.mean_versions_live:.2f}/{s.max_versions_live}"),
    ("trajectories moved", lambda s: f"{s.migrations:,}"),
    ("KV moved, bytes", lambda s: _big(s.kv_bytes_moved)),
    ("re-prefilled tokens", lambda s: _big(s.reprefilled_tokens)),
    ("mixed versions", lambda s: _share(s.mixed / s.trained) if s.trained else "-"),
    ("filtered, failed", lambda s: f"{s.filtered}, {s.failed}"),
    ("simulated in", lambda s: f"{s.wall_s:.1f} s"),
)
