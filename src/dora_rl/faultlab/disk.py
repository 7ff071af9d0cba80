"""A disk that is slow or full, as the run sees it: the kernel asks us before it syncs or writes.

Seccomp lets one process answer for system calls of another (`seccomp_unotify(2)`). A healthy disk
is the answer "continue"; a slow one is the same answer, later; a full one is `ENOSPC`.
"""

import errno
import fcntl
import os
import select
import socket
import struct
import threading
import time

from dora_rl.sandbox import linux

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of a seccomp listener
_REQUEST_BYTES = 80  # of a notification; it begins with its number
_CONTINUE = 1


def hand_over(line: socket.socket) -> None:
    """Let the process at the other end of `line` answer our disk calls, where the kernel can."""
    listener = linux.watch_calls(("fsync", "fdatasync", "pwrite64"))
    socket.send_fds(line, [b"."], [] if listener is None else [listener])
    if listener is not None:
        os.close(listener)


class Disk(threading.Thread):
    """Answers for the disk of a driver and its children, until the last of them is gone."""

    def __init__(self, line: socket.socket) -> None:
        """`line` brings the listener, sent by the driver's `hand_over`."""
        super().__init__(name="disk", daemon=True)
        self._line = line
        self._until = 0.0
        self._delay_s = 0.0
        self._full = False
        self._watching = False
        self.start()

    @property
    def watching(self) -> bool:
        """Whether the kernel asks us; else the disk behaves as it does, whatever was set here."""
        return self._watching

    def be_slow(self, delay_s: float, for_s: float) -> None:
        """Delay every sync and write by `delay_s`."""
        self._full, self._delay_s, self._until = False, delay_s, time.monotonic() + for_s

    def be_full(self, for_s: float) -> None:
        """Fail every sync and write with `ENOSPC`."""
        self._full, self._delay_s, self._until = True, 0.0, time.monotonic() + for_s

    def be_healthy(self) -> None:
        """End a slow or full phase now."""
        self._until = 0.0

    def run(self) -> None:
        try:
            _, listeners, _, _ = socket.recv_fds(self._line, 1, 1)
        except OSError:
            return
        for listener in listeners:
            self._watching = True
            try:
                self._answer(listener)
            finally:
                self._watching = False
                os.close(listener)

    def _answer(self, listener: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not any(happened & select.POLLHUP for _, happened in poll.poll()):
            request = bytearray(_REQUEST_BYTES)
            try:
                fcntl.ioctl(listener, _RECEIVE, request)
                (number,) = struct.unpack_from("=Q", request)
                fcntl.ioctl(listener, _SEND, self._reply(number))
            except OSError:  # the caller was killed meanwhile
                continue

    def _reply(self, number: int) -> bytes:
        if time.monotonic() < self._until:
            if self._full:
                return struct.pack("=QqiI", number, 0, -errno.ENOSPC, 0)
            time.sleep(self._delay_s)
        return struct.pack("=QqiI", number, 0, 0, _CONTINUE)
