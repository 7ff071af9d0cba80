"""Rewards and environments that the workers of the tests import by name."""

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dora_rl.tasks.environments import Step, ToolEnvironment

NOT_CALLABLE = 3


def length(response: str) -> float:
    return float(len(response))


async def slow_length(response: str) -> float:
    await asyncio.sleep(0.01)
    return float(len(response))


def parts(response: str) -> dict[str, float]:
    return {"length": len(response), "fixed": 0.5}


def asks_too_much(completion: str) -> float:
    return 1.0


def everything(response: str, example: dict[str, Any], /, **context: Any) -> float:
    seen = (response, example["x"], context["prompt"], context["answer"], context["trajectory"])
    return float(seen == ("r", 1, "p", "a", None))


def act(response: str, example: dict[str, Any]) -> Any:
    """Do what the response says: what a hostile or broken reward might."""
    return ACTS[response](example)


def _raise(example: dict[str, Any]) -> None:
    raise ValueError("no such luck")


def _hang(example: dict[str, Any]) -> None:
    time.sleep(600)


def _spin(example: dict[str, Any]) -> None:
    while True:
        pass


_number: list[int] = []


def _who(example: dict[str, Any]) -> int:
    """A number of this worker's own; its process id is its own business."""
    if not _number:
        _number.append(int.from_bytes(os.urandom(5), "big"))
    return _number[0]


def _leave_child(example: dict[str, Any]) -> None:
    """A child that outlives us in another process group, and a hang."""
    if os.fork() == 0:
        if example["escape"]:
            os.setsid()
        ctypes.CDLL(None).prctl(15, example["name"].encode(), 0, 0, 0)  # its name, to be found by
        time.sleep(600)
        os._exit(0)
    time.sleep(600)


def _connect(example: dict[str, Any]) -> float:
    with socket.create_connection(("127.0.0.1", example["port"]), timeout=60):
        return 1.0


def _print(example: dict[str, Any]) -> float:
    for _ in range(2000):
        print("x" * 1000)
        sys.stderr.write("y" * 1000)
    return 1.0


def _hang_up(example: dict[str, Any]) -> None:
    os.closerange(3, 100)
    time.sleep(600)


def _babble(example: dict[str, Any]) -> None:
    for number in range(3, 30):
        try:
            os.write(number, b"\xff" * 100)
        except OSError:
            continue
    time.sleep(600)


def _write_a_lot(example: dict[str, Any]) -> None:
    with open("large", "wb") as file:
        file.seek(100 << 20)
        file.write(b"x")


ACTS = {
    "good": lambda example: 1.0,
    "who": _who,
    "raise": _raise,
    "nan": lambda example: float("nan"),
    "infinite": lambda example: {"a": 1.0, "b": float("-inf")},
    "text": lambda example: "1.0",
    "nothing": lambda example: None,
    "empty": lambda example: {},
    "exit": lambda example: sys.exit(3),
    "vanish": lambda example: os._exit(3),
    "crash": lambda example: os.kill(os.getpid(), signal.SIGSEGV),
    "memory": lambda example: bytearray(1 << 30),
    "hang": _hang,
    "spin": _spin,
    "child": _leave_child,
    "connect": _connect,
    "secret": lambda example: float("DORA_TEST_SECRET" in os.environ),
    "own environment": lambda example: float(
        b"DORA_TEST_SECRET" in Path("/proc/self/environ").read_bytes()
    ),
    "print": _print,
    "hang up": _hang_up,
    "babble": _babble,
    "write": _write_a_lot,
    "deep": lambda example: _deep(),
    "surrogate": lambda example: {"\ud800": 1.0}["x"],
}


def _deep() -> Any:
    return _deep()


class Writer:
    """Leaves a note in the example's directory."""

    def reset(self, example: dict[str, Any]) -> str:
        (Path(example["directory"]) / "note").write_text("x")
        return "written"

    def step(self, text: str) -> Step:
        return Step("", done=True)


class Count:
    """Counts its steps up to the example's `n`; some words make it misbehave."""

    closed: list[int] = []  # noqa: RUF012 -- shared by the episodes of a worker

    def reset(self, example: dict[str, Any]) -> Any:
        self.n = example["n"]
        self.seen = 0
        return example.get("first", f"count to {self.n}")

    def step(self, text: str) -> Any:
        self.seen += 1
        if text in ACTS:
            ACTS[text]({})
        if text == "who":
            return str(_who({})), 0.0, False
        if text == "closed":
            return Step(str(len(self.closed)))
        if text == "wrong":
            return "only text"
        return Step(f"{self.seen} of {self.n}", float(self.seen), self.seen >= self.n)

    def close(self) -> None:
        self.closed.append(1)


class AsyncCount(Count):
    async def reset(self, example: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return super().reset(example)

    async def step(self, text: str) -> Any:
        await asyncio.sleep(0)
        return super().step(text)


class NoStep:
    def reset(self, example: dict[str, Any]) -> None: ...


async def _later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def _divide(a: float, b: float) -> float:
    return a / b


class Calculator(ToolEnvironment):
    tools = {"divide": _divide, "later": _later}  # noqa: RUF012

    def finish(self, text: str) -> float:
        return float(text == self.example["answer"])


def numbers(count: int = 3) -> list[dict[str, str]]:
    return [{"prompt": f"{n}?", "answer": str(n)} for n in range(count)]


def yielded() -> Any:
    yield from numbers(4)


def at(position: int, seed: int, base: int = 0) -> dict[str, str]:
    return {"prompt": f"{seed}:{base + position}?"}
