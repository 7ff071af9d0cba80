"""Where the log lines of a process go, and how they look: the one place that sets up `logging`.

Every module logs to `logging.getLogger(__name__)`. Importing the package configures nothing: the
logger `dora_rl` has a `NullHandler`, so that a program that uses the package decides for itself.
The command line writes to stderr if it is asked to, a worker to its own file in the run's `logs/`.
One record is one line, and each names who wrote it: the role of its process and, of a worker, its
instance and incarnation.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from dora_rl.core.protocol.errors import UserError

LEVEL = "DORA_RL_LOG"
FORMAT = "DORA_RL_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_WORKER_LEVEL = "warning"  # where none is asked for: the file of a worker without trouble is empty
_LINE = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ dora_rl|\{"time": "\d{4}-')


class Writer(NamedTuple):
    """Who writes a line; of the driver's process, the role alone."""

    role: str
    instance: int | None = None
    incarnation: int | None = None

    def fields(self) -> dict[str, str | int]:
        return {name: value for name, value in self._asdict().items() if value is not None}


class _Lines(logging.Formatter):
    """A record as one line: whatever would break it, or steer a terminal, becomes an escape."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def format(self, record: logging.LogRecord) -> str:
        said = " ".join(f"{name}={value}" for name, value in self._writer.fields().items())
        text = f"{_time(record)} {record.levelname} {record.name} {said}: {super().format(record)}"
        return "".join(c if c.isprintable() else _escape(c) for c in text)


class _JsonLines(logging.Formatter):
    """A record as one JSON object."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._writer.fields(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.StreamHandler[TextIO]):
    """Stderr. The live display stands in for it to write above itself: on a terminal, it may."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._stderr = sys.stderr

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr if self._stderr.isatty() else self._stderr


def check_level(level: str, source: str = LEVEL) -> str:
    """The level, if it is one; `source` is who named it."""
    if level.lower() not in LEVELS:
        raise UserError(f"{source} must be one of {', '.join(LEVELS)}: `{level}`.")
    return level.lower()


@contextmanager
def to_stderr(level: str | None) -> Iterator[None]:
    """Write the lines of this process to stderr inside; without a level, none.

    Processes that are started inside have the same level, by their environment.
    """
    format_ = _format()
    if level is None:
        yield
        return
    logger, variable = logging.getLogger("dora_rl"), os.environ.get(LEVEL)
    handler, before = _handler(Writer("driver"), format_), logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    os.environ[LEVEL] = level
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        if variable is None:
            del os.environ[LEVEL]
        else:
            os.environ[LEVEL] = variable


def start_worker(role: str, instance: int, incarnation: int) -> None:
    """Write the lines of this process to its stderr, from now on, as the environment says."""
    level = check_level(os.environ.get(LEVEL) or _WORKER_LEVEL)
    logger = logging.getLogger("dora_rl")
    logger.addHandler(_handler(Writer(role, instance, incarnation), _format()))
    logger.setLevel(level.upper())


def is_line(text: str) -> bool:
    """Whether a line of a worker's file is of a log record, rather than printed by its code."""
    return _LINE.match(text) is not None


def _handler(writer: Writer, format_: str) -> logging.Handler:
    handler = _Stderr()
    handler.setFormatter(_JsonLines(writer) if format_ == "json" else _Lines(writer))
    return handler


def _format() -> str:
    chosen = os.environ.get(FORMAT) or FORMATS[0]
    if chosen.lower() not in FORMATS:
        raise UserError(f"{FORMAT} must be one of {', '.join(FORMATS)}: `{chosen}`.")
    return chosen.lower()


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
