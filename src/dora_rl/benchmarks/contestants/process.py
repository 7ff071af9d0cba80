"""The parent's side of the protocol: a child process that is asked, watched and ended.

A child that dies, hangs or answers nonsense ends the measurement with a `ContestantFailed` that
names it. Knows nothing of engines, models or what is measured.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import DoraError

SERVING = Path(__file__).with_name("serving.py")
LOAD_TIMEOUT_S = 900.0  # vLLM takes half a minute on an idle machine, more from a cold disk
ANSWER_TIMEOUT_S = 3600.0  # a batch of long sequences on a slow machine; a hang has no end
_LAST_LINES = 5
_LAST_CHARS = 800
_END_S = 10.0  # to leave in peace
_SETTLE_S = 0.05  # one look at the processor time; it is counted in ticks of 10 ms
_SETTLE_LIMIT_S = 2.0
_CHUNK = 1 << 16


class ContestantFailed(DoraError):
    """A contestant died, hung, or did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a contestant is started, and what it is asked to `load`."""

    name: str
    python: Sequence[str]  # the interpreter with its options
    file: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    serving: Sequence[str] = (str(SERVING),)  # what the interpreter runs


class Contestant:
    """One child process. Use it as a context manager: it is gone at the end, whatever happens."""

    def __init__(self, start: Start, work: Path) -> None:
        self.name = start.name
        self._settings = start.settings
        self._last_words = work / f"{start.name}.stderr"
        self._requests = 0
        self._asked = "start"
        self._unread = b""
        with open(self._last_words, "wb") as stderr:
            self._child = subprocess.Popen(
                [*start.python, *start.serving, str(start.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # What a killed child leaves behind goes with the directory.
                env={**os.environ, "TMPDIR": str(work), **start.env},
                pass_fds=start.pass_fds,
                # Ctrl-C is for us; and a whole group can be ended at once.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(gently=kind is None)

    def load(self) -> None:
        self.send("load", **self._settings)
        self.receive(LOAD_TIMEOUT_S)

    def ask(self, request: str, **arguments: Any) -> Any:
        """Make a request and wait for its answer."""
        self.send(request, **arguments)
        return self.receive()

    def send(self, request: str, **arguments: Any) -> None:
        """Make a request; `receive` has the answer."""
        self._requests += 1
        self._asked = request
        line = json.dumps({"id": self._requests, "do": request, "with": arguments}) + "\n"
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line.encode())
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The answer to the last request; other lines are skipped."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = _parse(self._line(deadline, timeout_s))
            if answer is not None and answer["id"] == self._requests:
                return answer["done"]

    def cpu_s(self) -> float | None:
        """Processor time of the child so far, where the system tells."""
        try:
            stat = Path(f"/proc/{self._child.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def settle(self) -> bool:
        """Wait until its threads have stopped spinning after their work; whether they have."""
        limit = time.monotonic() + _SETTLE_LIMIT_S
        before = self.cpu_s()
        while time.monotonic() < limit:
            time.sleep(_SETTLE_S)
            now = self.cpu_s()
            if before is None or now is None or now - before < _SETTLE_S / 2:
                return True
            before = now
        return False

    def end(self, *, gently: bool = True) -> None:
        """End the process and all that it started."""
        child = self._child
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            if gently:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_END_S)
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._child.stdout is not None
        pipe = self._child.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ContestantFailed(
                    f"{self.name} did not answer to `{self._asked}` within {timeout_s:g} s."
                )
            data = os.read(pipe, _CHUNK)
            if not data:
                raise self._death()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> ContestantFailed:
        """What is known of a child that closed its pipe."""
        try:
            code = self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return ContestantFailed(f"{self.name} closed its pipe at `{self._asked}` and hangs.")
        how = f"ended with code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"died of {signal.Signals(-code).name}"
        text = self._last_words.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        words = " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARS:]
        said = f"Its last output: {words}" if words else "It printed nothing."
        return ContestantFailed(f"{self.name} {how} when asked to `{self._asked}`. {said}")


class ContestantGroup:
    """Contestants that take turns: one computes, the others must be idle, which is watched."""

    def __init__(self, members: Sequence[Contestant]) -> None:
        self._members = {member.name: member for member in members}
        self._idle_cpu_s = dict.fromkeys(self._members, 0.0)
        self._idle_s = dict.fromkeys(self._members, 0.0)

    def ask(self, name: str, request: str, **arguments: Any) -> Any:
        """As `Contestant.ask`; returns when the one that was asked is idle again."""
        before = {other: self._members[other].cpu_s() for other in self._members}
        began = time.monotonic()
        answer = self._members[name].ask(request, **arguments)
        taken = time.monotonic() - began
        for other, cpu_s in before.items():
            after = self._members[other].cpu_s()
            if other != name and cpu_s is not None and after is not None:
                self._idle_cpu_s[other] += after - cpu_s
                self._idle_s[other] += taken
        self._members[name].settle()
        return answer

    def idle_shares(self) -> dict[str, float]:
        """How much of a processor each used while another one was measured."""
        return {
            name: self._idle_cpu_s[name] / seconds if seconds else 0.0
            for name, seconds in self._idle_s.items()
        }


def start_all(
    stack: ExitStack, starts: Sequence[Start], work: Path, reporter: Reporter
) -> list[Contestant]:
    """Start and load one after the other; they end with the stack."""
    members = []
    for start in starts:
        reporter.phase(f"loading {start.name}")
        members.append(stack.enter_context(Contestant(start, work)))
        members[-1].load()
    return members


def _parse(line: bytes) -> dict[str, Any] | None:
    """An answer, or nothing if the line is noise."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and answer.keys() == {"id", "done"} else None
