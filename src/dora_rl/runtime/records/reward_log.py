"""`logs/rewards.log`: what rewards and environments print, and why they fail.

Their output is hostile: control characters are written as escapes, an entry has a largest size, and
so has the file. A full one is kept once, as `rewards.log.1`. A run does not end for its log.
"""

import time
from contextlib import suppress
from pathlib import Path

LARGEST = 1 << 20  # bytes of the file; two of them are the most that there is
_ENTRY = 10_000  # characters
_INDENT = "  "


class RewardLog:
    """Appends entries; made when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entry(self, of: str, text: str) -> None:
        """What was printed for a trajectory, or an evaluation."""
        lines = printable(text[:_ENTRY]).splitlines() or [""]
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        body = "".join(f"{_INDENT}{line}\n" for line in lines)
        self._append(f"{moment} {of}\n{body}")

    def note_once(self, line: str) -> None:
        """A line of our own, unless it stands there."""
        with suppress(OSError):
            if f"{line}\n" in self._path.read_text(encoding="utf-8", errors="replace"):
                return
        self._append(f"{line}\n")

    def _append(self, text: str) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > LARGEST:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)


def printable(text: str) -> str:
    """Text that a terminal shows as it is: whatever would steer it becomes an escape."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
