"""What an examination found: plain data, its words, its verdict."""

import textwrap
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

_WIDTH = 100


class Status(StrEnum):
    OK = "ok"
    FALLS_BACK = "falls back"  # slower, or less guarded, and works
    MISSING = "missing"  # of what only some commands need
    FAILS = "fails"  # `dora-rl train` would


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    name: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether `dora-rl train` would work."""
        return all(finding.status is not Status.FAILS for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def lines(self) -> list[str]:
        """All of it, by topic, and the verdict last."""
        names = max((len(finding.name) for finding in self.findings), default=0)
        lines: list[str] = []
        for topic in dict.fromkeys(finding.topic for finding in self.findings):
            lines += ["", topic] if lines else [topic]
            for finding in self.findings:
                if finding.topic == topic:
                    lines += _lines(finding, names)
        return [*lines, "", self._verdict()]

    def _verdict(self) -> str:
        failing = [finding.name for finding in self.findings if finding.status is Status.FAILS]
        if failing:
            return f"dora-rl train would fail here: {', '.join(failing)}"
        slower = sum(finding.status is Status.FALLS_BACK for finding in self.findings)
        return f"dora-rl train works here{f'; {slower} fast paths fall back' if slower else ''}"


def _lines(finding: Finding, names: int) -> list[str]:
    status = max(map(len, Status))
    head = f"  {finding.status:<{status}}  {finding.name:<{names}}  "
    rest = " " * len(head)
    lines = _wrapped(finding.text, head, rest)
    if finding.fix and finding.status is not Status.OK:
        lines += _wrapped(f"fix: {finding.fix}", rest, rest)
    return lines


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
