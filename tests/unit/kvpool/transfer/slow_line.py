"""A TCP line that a test can cut, or make slow: it stands between a fetcher and a pool."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Line:
    """Forwards connections to a port until told otherwise."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cuts_after = list[int]()
        """Bytes towards the client after which each next connection is cut."""
        self.flips_at = list[int]()
        """Places of bytes towards the client that change, one in each next connection."""
        self.is_down = False
        """New connections are closed at once."""
        self.bytes_s = 0.0
        """Most bytes per second towards a client; 0: no limit."""
        self._open = list[socket.socket]()
        self._threads = list[threading.Thread]()
        self._start(self._accept)

    def close(self) -> None:
        self.is_down = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()

    def cut(self) -> None:
        """Break all connections now."""
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_down:
                    client.close()
                    continue
                limit = self.cuts_after.pop(0) if self.cuts_after else -1
                flip = self.flips_at.pop(0) if self.flips_at else -1
                self._open.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except ConnectionRefusedError:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._open.append(server)
                self._start(_forward, client, server, -1, -1, lambda: 0.0)
                self._start(_forward, server, client, limit, flip, lambda: self.bytes_s)


def _forward(
    source: socket.socket,
    target: socket.socket,
    limit: int,
    flip: int,
    bytes_s: Callable[[], float],
) -> None:
    passed, due = 0, time.monotonic()
    with suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            if passed <= flip < passed + len(data):
                data[flip - passed] ^= 1
            passed += len(data)
            if 0 <= limit < passed:
                break
            if speed := bytes_s():
                due = max(due, time.monotonic()) + len(data) / speed
                time.sleep(max(0.0, due - time.monotonic()))
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
