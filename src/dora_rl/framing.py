"""Messages on a stream of bytes: each with its length before it, refused if it is too long."""

import struct

_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _LENGTH.size


def frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Bytes as they come into whole messages; none of them longer than `largest`."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete."""
        unread = self._unread
        unread += data
        found = []
        start = 0
        while len(unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, start)
            if length > self._largest:
                raise ValueError(f"a message of {length} bytes; {self._largest} are the most")
            end = start + _LENGTH.size + length
            if len(unread) < end:
                break
            found.append(bytes(unread[start + _LENGTH.size : end]))
            start = end
        if start:
            del unread[:start]
        return found
