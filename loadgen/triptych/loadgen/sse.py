"""Server-sent events as OpenAI-compatible servers write them: bytes in, ``data`` fields out."""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventSplitter:
    """Cuts a byte stream, in whatever pieces it arrives, into the ``data`` of its events.

    Comments and other fields are skipped. OpenAI-compatible servers write one ``data``
    line per event, so a line is an event here.
    """

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Take the next bytes; yield the data of every event that they complete."""
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
