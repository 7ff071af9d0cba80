"""Messages over a socket pair, for either end; or their bytes, for who only passes them on.

The driver's end never blocks: what does not go out at once waits here. A worker's end may wait,
since the driver always reads. The end of the stream is the death of the other side.

Several threads may send, since a worker's heartbeat has its own; one thread receives.
"""

import select
import socket
import threading
from collections import deque

from dora_rl.framing import Frames, frame
from dora_rl.runtime.control import messages as ms

_LARGEST = 1 << 36  # bytes of one message: a batch of a very long run fits
_CHUNK = 1 << 20


class Gone(Exception):
    """The other side has ended."""


def stream() -> Frames:
    """What makes messages of bytes: the state of one direction of a channel."""
    return Frames(_LARGEST)


def decoded(frames: Frames, data: bytes) -> list[ms.Message]:
    """The messages that these bytes complete."""
    return [ms.decode(content) for content in frames.feed(data)]


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._frames = stream()
        self._unsent: deque[memoryview] = deque()
        self._sending = threading.Lock()  # a message goes out whole before the next begins
        self._unread: list[ms.Message] = []

    @property
    def unsent(self) -> bool:
        """Whether something waits for the socket to take more."""
        return bool(self._unsent)

    def send(self, message: ms.Message) -> None:
        """Queue a message and send what goes."""
        self.send_bytes(frame(ms.encode(message)))

    def send_bytes(self, framed: bytes) -> None:
        """Queue whole messages, as the other end of a channel has them, and send what goes."""
        with self._sending:
            self._unsent.append(memoryview(framed))
            self._flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0][:_CHUNK])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone from error

    def receive(self) -> list[ms.Message]:
        """The messages that have come; waits for bytes if the socket does."""
        if self._unread:
            messages, self._unread = self._unread, []
            return messages
        return decoded(self._frames, self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """What has come, not necessarily whole messages; empty if a socket that never waits is."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        return data

    def put_back(self, messages: list[ms.Message]) -> None:
        """Receive these again, before all others."""
        self._unread = [*messages, *self._unread]

    def wait(self, timeout_s: float | None) -> bool:
        """Whether there is something to receive, within the time given."""
        return bool(self._unread) or bool(select.select([self.socket], [], [], timeout_s)[0])

    def close(self) -> None:
        self.socket.close()
