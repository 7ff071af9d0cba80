"""`run_python`: one program of somebody else's, its output, and how it ended."""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dora_rl.sandbox import scratch
from dora_rl.sandbox.errors import SandboxError
from dora_rl.sandbox.isolation import clean_environment
from dora_rl.sandbox.programs.messages import Ended, Job
from dora_rl.sandbox.protocol import Frames, pack

_START_S = 60.0  # for a supervisor to start, and to end everybody
_END_S = 5.0
_CHUNK = 1 << 16
_LEAST_MB = 16


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ended; by then, all that it started has ended as well."""

    stdout: str
    stderr: str
    returncode: int
    """Its exit code; negative: the signal that killed it."""
    timed_out: bool
    truncated: bool
    """It wrote more than `max_output` to one of both; the rest is not there."""
    seconds: float
    gaps: tuple[str, ...]
    """What this system did not keep from it; empty where all of the sandbox holds."""

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.timed_out


def run_python(
    code: str,
    *,
    stdin: str | bytes = "",
    timeout_s: float = 10.0,
    memory_mb: int = 256,
    max_output: int = 1 << 20,
) -> Execution:
    """Run `code` as `python main.py` in a process of its own, and wait for its end.

    It has this interpreter and its installed libraries to read, a scratch directory to write,
    no network, no file and no environment variable of ours. At `timeout_s` it is killed with all
    that it started. `memory_mb` is for each of its processes, on top of what Python needs.
    """
    if not timeout_s > 0:
        raise SandboxError(f"timeout_s must be > 0: `{timeout_s}`. Give it seconds.")
    if memory_mb < _LEAST_MB:
        raise SandboxError(f"memory_mb must be >= {_LEAST_MB}: `{memory_mb}`. Python needs them.")
    directory = tempfile.mkdtemp(prefix="dora-rl-sandbox-")
    try:
        job = Job(
            code=code.encode("utf-8", "surrogatepass"),
            scratch=os.fsencode(directory),
            timeout_s=timeout_s,
            memory_mb=memory_mb,
        )
        sent = stdin if isinstance(stdin, bytes) else stdin.encode("utf-8", "surrogatepass")
        with _Supervisor() as supervisor:
            return supervisor.run(job, sent, max_output)
    finally:
        scratch.remove(directory)


def _import_path() -> list[str]:
    """Ours, without the working directory: in a worker anybody may have written there."""
    ours, here = str(Path(__file__).parents[2]), os.getcwd()
    others = [entry for entry in map(os.path.abspath, sys.path) if os.path.realpath(entry) != here]
    return list(dict.fromkeys([ours, *others]))


class _Supervisor:
    """The process above the program, and the pipes to both."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "dora_rl.sandbox.programs", str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=clean_environment(os.environ)
                    | {"PYTHONPATH": os.pathsep.join(_import_path())},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise

    def __enter__(self) -> "_Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # it ends everybody, and itself
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):  # nobody reads what was left to write
                    stream.close()

    def run(self, job: Job, stdin: bytes, max_output: int) -> Execution:
        assert self._process.stdout is not None and self._process.stderr is not None
        out = _Kept(self._process.stdout.fileno(), max_output)
        errors = _Kept(self._process.stderr.fileno(), max_output)
        with suppress(BrokenPipeError, ConnectionResetError):  # it is told below
            self._channel.sendall(pack(job))
        ended = self._await_end(stdin, (out, errors), job.timeout_s + _START_S)
        for kept in (out, errors):
            kept.read()  # what is in the pipe: whoever could write to it has ended
        if ended is None:
            said = " | ".join(errors.text().strip().splitlines()[-2:])
            raise SandboxError(f"the program was not run, or its end is not known. {said}".rstrip())
        return Execution(
            stdout=out.text(),
            stderr=errors.text(),
            returncode=ended.returncode,
            timed_out=ended.timed_out,
            truncated=out.cut or errors.cut,
            seconds=ended.seconds,
            gaps=ended.gaps,
        )

    def _await_end(
        self, stdin: bytes, outputs: "tuple[_Kept, ...]", guard_s: float
    ) -> Ended | None:
        """Feed it, keep what it writes, until the supervisor says how it ended."""
        assert self._process.stdin is not None
        pipe, rest, frames = self._process.stdin.fileno(), memoryview(stdin), Frames()
        os.set_blocking(pipe, False)
        deadline = time.monotonic() + guard_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            selector.register(self._channel, selectors.EVENT_READ)
            for kept in outputs:
                selector.register(kept.number, selectors.EVENT_READ, kept)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fd == pipe:
                        rest = _written(pipe, rest)
                        if not rest:
                            selector.unregister(pipe)
                            self._process.stdin.close()
                    elif isinstance(key.data, _Kept):
                        if not key.data.read():
                            selector.unregister(key.fd)
                    else:
                        data = _received(self._channel)
                        for content in frames.feed(data):
                            return msgspec.msgpack.decode(content, type=Ended)
                        if not data:
                            return None
        return None


class _Kept:
    """The beginning of what comes out of a pipe; all of it is read, so that nobody waits."""

    def __init__(self, number: int, most: int) -> None:
        self.number = number
        self.cut = False
        self._most = most
        self._content = bytearray()
        os.set_blocking(number, False)

    def read(self) -> bool:
        """Take what is there; whether there may be more one day."""
        with suppress(BlockingIOError):
            while data := os.read(self.number, _CHUNK):
                room = self._most - len(self._content)
                self.cut |= len(data) > room
                self._content += data[:room]
            return False
        return True

    def text(self) -> str:
        return self._content.decode("utf-8", "replace")


def _written(pipe: int, rest: memoryview) -> memoryview:
    """What is left to be written; nothing if nobody reads it any more."""
    try:
        return rest[os.write(pipe, rest[:_CHUNK]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        return rest[:0]


def _received(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_CHUNK)
    except ConnectionResetError:
        return b""
