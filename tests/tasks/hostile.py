"""Rewards that attack: the worker, its siblings, the driver, the machine. Imported by name."""

import ctypes
import fcntl
import glob
import os
import re
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

Example = dict[str, Any]

FORBIDDEN = (
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY", "MY_SECRET"),
    *("OPENAI_API_KEY", "DB_PASSWORD", "GITHUB_TOKEN", "LC_TOKEN", "SSH_AUTH_SOCK"),
)
SECRET = "swordfish"  # the value of all of them


def act(response: str, example: Example) -> Any:
    return ATTACKS[response](example)


def name_process(name: str) -> None:
    """So that a test finds it, from any namespace of processes."""
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def _loop(example: Example) -> None:
    while True:
        pass


def _fork_bomb(example: Example) -> None:
    name_process(example["name"])
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.05)  # there is no room for more; the others on this machine want to live


def _memory_bomb(example: Example) -> None:
    hoard = []
    while True:
        hoard.append(bytes(1 << 20))


def _mapped_bomb(example: Example) -> None:
    import mmap

    mapped = mmap.mmap(-1, 1 << 34)
    mapped.write(b"x" * (1 << 20))


def _places(example: Example) -> Iterator[bytes]:
    yield repr(dict(os.environ)).encode()
    numbers = {example["driver"], os.getppid(), os.getpid()}
    for pid in [*map(str, numbers), "self", *os.listdir("/proc")]:
        with suppress(OSError):
            yield Path("/proc", pid, "environ").read_bytes()


def _spy(example: Example) -> float:
    """The number of places where a secret of the driver's can be read."""
    return float(sum(SECRET.encode() in place for place in _places(example)))


def _read_memory(example: Example) -> float:
    """How much of the driver can be opened: its memory, its files, what it is."""
    found = 0
    for name in ("mem", "maps", "environ"):
        with suppress(OSError), open(f"/proc/{example['driver']}/{name}", "rb"):
            found += 1
    with suppress(OSError):
        for number in os.listdir(f"/proc/{example['driver']}/fd"):  # the numbers alone tell nothing
            with suppress(OSError):
                found += bool(os.readlink(f"/proc/{example['driver']}/fd/{number}"))
    return float(found)


def _tcp(example: Example) -> float:
    with socket.create_connection(("127.0.0.1", example["port"]), timeout=60):
        return 1.0


def _udp(example: Example) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"secret", ("127.0.0.1", example["port"]))
    return 1.0


def _unix(example: Example) -> float:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(example["address"])
    return 1.0


def _abstract(example: Example) -> float:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + example["abstract"])
    return 1.0


def _datagram_pair(example: Example) -> float:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        left.sendto(b"secret", example["datagram"])
    return 1.0


def _raw_socket_call(example: Example) -> float:
    """Past Python: the C library's own function."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    if number < 0:
        raise OSError(ctypes.get_errno(), "refused")
    address = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(example["port"]), b"\x7f\0\0\1")
    if libc.connect(number, address, len(address)):
        raise OSError(ctypes.get_errno(), "refused")
    return 1.0


def _write_outside(example: Example) -> float:
    """How many of the places took what was written."""
    taken = 0
    for directory in example["directories"]:
        path = Path(directory, "left-by-a-reward")
        for do in (
            lambda path: path.write_text("x"),
            lambda path: path.mkdir(),
            lambda path: path.symlink_to("/etc/passwd"),
            lambda path: os.mkfifo(path),
        ):
            with suppress(OSError):
                do(path)
                taken += 1
    for path in map(Path, example["files"]):
        for do in (
            lambda path: path.write_text("x"),
            lambda path: os.truncate(path, 0),
            lambda path: path.unlink(),
            lambda path: path.rename(path.with_suffix(".moved")),
            lambda path: os.link(path, "linked"),
        ):
            with suppress(OSError):
                do(path)
                taken += 1
    return float(taken)


def _write_inside(example: Example) -> float:
    """Relative names and temporary files work, and are in one place."""
    Path("note").write_text("x")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
        return float(Path(file.name).parent == Path.cwd() and Path(os.environ["TMPDIR"]).is_dir())


def _look_for_note(example: Example) -> float:
    return float(Path("note").exists())


def _fill_scratch(example: Example) -> float:
    """Bytes that were taken before the end of the room, in MiB."""
    taken = 0
    with suppress(OSError):
        for number in range(1000):
            with open(f"large-{number}", "wb") as file:
                for _ in range(60):
                    taken += file.write(bytes(1 << 20)) >> 20
                    file.flush()
    return float(taken)


def _change_attributes(example: Example) -> float:
    """How many changes of what is not written, but known of a file, were taken."""
    taken = 0
    for path in map(Path, example["files"]):
        for do in (
            lambda path: path.chmod(0o500),
            lambda path: os.chmod(path, 0o500, follow_symlinks=False),
            lambda path: os.chown(path, -1, os.getgid()),
            lambda path: os.utime(path, (1, 1)),
            lambda path: os.setxattr(path, "user.reward", b"x"),
            lambda path: os.removexattr(path, "user.before"),
        ):
            with suppress(OSError, NotImplementedError):
                do(path)
                taken += 1
        with suppress(OSError):
            opened = os.open(path, os.O_RDONLY)
            for do in (
                lambda opened: os.fchmod(opened, 0o500),
                lambda opened: os.utime(opened, (1, 1)),
                lambda opened: fcntl.ioctl(opened, 0x40086602, struct.pack("@l", 0x40)),
            ):
                with suppress(OSError):
                    do(opened)
                    taken += 1
    return float(taken)


def _change_own(example: Example) -> float:
    """Whether a file of its own can be given another mode and another time."""
    path = Path("own")
    path.write_text("x")
    path.chmod(0o500)
    os.utime(path, (1, 1))
    return float(path.stat().st_mode & 0o777 == 0o500 and path.stat().st_mtime == 1)


def _lock(example: Example) -> float:
    """How many of the files could be locked, for as long as the worker lives."""
    taken = 0
    for path in example["files"]:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with suppress(OSError):
                KEPT.append(os.open(path, flags))
                fcntl.flock(KEPT[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken += 1
    return float(taken)


def _look_at(example: Example) -> float:
    """How many of the files can be read."""
    found = 0
    for path in example["files"]:
        with suppress(OSError), open(path, "rb") as file:
            found += bool(file.read(1))
    return float(found)


def _link_out(example: Example) -> None:
    os.symlink(example["directory"], "way-out")
    os.mkdir("closed")
    Path("closed", "file").write_text("x")
    os.chmod("closed", 0)
    for _ in range(1100):  # deeper than the stack, or a table of files
        os.mkdir("d")
        os.chdir("d")
    os._exit(5)


def _print(example: Example) -> float:
    text = b"x" * (1 << 20)
    for _ in range(1000):
        for number in (1, 2):
            os.write(number, text)
    print("x" * 1000)
    print("y" * 1000, file=sys.stderr)
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write("x" * 1000)
    return 1.0


def _kill(whom: Callable[[Example], int], number: int) -> Callable[[Example], float]:
    def attack(example: Example) -> float:
        os.kill(whom(example), number)
        return 1.0

    return attack


def _reach_others(example: Example) -> float:
    """How many processes can be signalled, besides the first one in here and its own group."""
    found = 0
    for pid in range(2, 40_000):
        if pid != os.getpid():
            with suppress(OSError):
                os.kill(pid, 0)
                found += 1
    return float(found)


def _kill_group(example: Example) -> None:
    os.killpg(0, signal.SIGKILL)


def _close_files(example: Example) -> float:
    os.closerange(0, 1024)
    return 1.0


def _exhaust_files(example: Example) -> float:
    KEPT.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(100_000))
    return 1.0


KEPT: list[int] = []


def _daemon(example: Example) -> float:
    """A grandchild in a session of its own that outlives its parents."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            name_process(example["name"])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.closerange(0, 1024)
            time.sleep(600)
        os._exit(0)
    os.wait()
    return 1.0


def _raise(error: BaseException) -> Callable[[Example], None]:
    def attack(example: Example) -> None:
        raise error

    return attack


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise SystemExit(9)


class Float:
    """A number that does what it is told when it is looked at."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def __float__(self) -> float:
        return self.do()  # type: ignore[no-any-return]


def _c_recursion(example: Example) -> Any:
    sys.setrecursionlimit(1 << 30)
    left: Any = []
    right: Any = []
    for _ in range(200_000):
        left, right = [left], [right]
    return left == right


def _segfault(example: Example) -> None:
    ctypes.string_at(0)


def worker_frame() -> FrameType:
    """The worker's loop, which called us: a reward can find all that it has."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_work":
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def _forge(content: bytes, seconds: float = 0.0) -> Callable[[Example], None]:
    """Answer in the worker's name, past it."""

    def attack(example: Example) -> None:
        from dora_rl.sandbox.protocol import Answer, pack

        frame = worker_frame()
        answer = Answer(frame.f_locals["number"], content, seconds, False)
        message = pack(answer.sealed(frame.f_locals["key"]))
        for number in range(3, 30):
            with suppress(OSError):
                os.write(number, message)
        time.sleep(600)

    return attack


def _fork_and_return(example: Example) -> float:
    """Two copies of the worker, and each has an answer."""
    if os.fork() == 0:
        time.sleep(0.05)
        return 0.0
    return 1.0


def _answer_later(example: Example) -> float:
    """An answer to this request while the next one runs, which says that it does."""
    from dora_rl.sandbox.protocol import Answer, pack

    key = bytes(worker_frame().f_locals["key"])

    def forge() -> None:
        NEXT_ONE.wait()
        message = pack(Answer(1, b'{"reward":7.0}', 0.0, False).sealed(key))
        for number in range(3, 30):
            with suppress(OSError):
                os.write(number, message)

    threading.Thread(target=forge, daemon=True).start()
    return 1.0


NEXT_ONE = threading.Event()


def _next_one(example: Example) -> None:
    NEXT_ONE.set()
    time.sleep(600)


def _stop_and_go(example: Example) -> float:
    """Deaf and blind to polite signals."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
    return 1.0


def _raise_limits(example: Example) -> float:
    """Whether a limit can be taken back."""
    for what in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return 1.0
    return 0.0


def _unmount(example: Example) -> float:
    """Whether what hides the home directory's secrets can be taken away, or been seen through."""
    ctypes.CDLL(None).umount2(os.fsencode(example["private"]), 2)
    return float(any(Path(path).is_file() for path in glob.glob(f"{example['private']}/*")))


def _babble_json(depth: int) -> bytes:
    return b'{"parts":' + b"[" * depth


ATTACKS: dict[str, Callable[[Example], Any]] = {
    "good": lambda example: 1.0,
    "fork and return": _fork_and_return,
    "answer later": _answer_later,
    "next one": _next_one,
    "nap": lambda example: time.sleep(example["seconds"]) or 1.0,
    "loop": _loop,
    "backtracking": lambda example: re.match(r"(a+)+$", "a" * 60 + "b"),
    "deaf": _stop_and_go,
    "fork bomb": _fork_bomb,
    "memory bomb": _memory_bomb,
    "mapped bomb": _mapped_bomb,
    "spy": _spy,
    "read memory": _read_memory,
    "tcp": _tcp,
    "udp": _udp,
    "unix": _unix,
    "abstract": _abstract,
    "datagram pair": _datagram_pair,
    "raw socket call": _raw_socket_call,
    "write outside": _write_outside,
    "write inside": _write_inside,
    "look for note": _look_for_note,
    "fill scratch": _fill_scratch,
    "change attributes": _change_attributes,
    "change own": _change_own,
    "lock": _lock,
    "look at": _look_at,
    "link out": _link_out,
    "print": _print,
    "kill parent": _kill(lambda example: os.getppid(), signal.SIGKILL),
    "stop parent": _kill(lambda example: os.getppid(), signal.SIGSTOP),
    # Signal 0 asks whether one could: a broken lock must not cost the machine.
    "kill all": _kill(lambda example: -1, 0),
    "kill driver": _kill(lambda example: int(example["driver"]), 0),
    "kill zygote": _kill(lambda example: int(example["zygote"]), 0),
    "reach others": _reach_others,
    "kill group": _kill_group,
    "close files": _close_files,
    "exhaust files": _exhaust_files,
    "daemon": _daemon,
    "system exit": _raise(SystemExit(0)),
    "interrupt": _raise(KeyboardInterrupt()),
    "base exception": _raise(BaseException("odd")),
    "generator exit": _raise(GeneratorExit()),
    "unspeakable": _raise(Unspeakable()),
    "float raises": lambda example: Float(lambda: 1 / 0),
    "float exits": lambda example: Float(lambda: sys.exit(0)),
    "float hangs": lambda example: Float(lambda: time.sleep(600)),
    "float of a part exits": lambda example: {"a": Float(lambda: os._exit(4))},
    "recursion": lambda example: ATTACKS["recursion"](example),
    "C recursion": _c_recursion,
    "segfault": _segfault,
    "abort": lambda example: os.abort(),
    "raise limits": _raise_limits,
    "unmount": _unmount,
    "forged infinity": _forge(b'{"reward":1e999}'),
    "forged part": _forge(b'{"reward":1.0,"parts":{"a":1e999}}'),
    "forged nesting": _forge(_babble_json(200_000)),
    "forged failure": _forge(msgspec.json.encode({"failure": "x\n" * 1_000_000})),
    "forged time": _forge(b'{"reward":1.0}', float("nan")),
    "forged nothing": _forge(b"null"),
}
