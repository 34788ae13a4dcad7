"""Parse server-sent events of OpenAI-compatible servers: bytes in, ``data`` fields out."""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventSplitter:
    """Splits a byte stream into the ``data`` of its events.

    Comments and other fields are skipped. OpenAI-compatible servers write one ``data``
    line per event, so a line is an event here.
    """

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Add bytes; yield the data of each completed event."""
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
