"""Passes open file descriptors from the pool to its workers, over a Unix socket.

A worker sends a byte for each arena that it wants, its index. The answer is a byte with the
descriptors in the same order, or the text of an error.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from triptych.core.errors import PoolError, PoolUnavailable
from triptych.kvpool.pool.listener import connections

TIMEOUT_S = 30.0
MOST = 64
"""Most descriptors of a pool."""
MOST_TEXT = 4096
"""Most bytes of an error."""


def descriptors_path(address: str) -> Path:
    """Where the descriptors of a pool are: beside its Unix socket."""
    return Path(address.removeprefix("unix:")).with_suffix(".fds")


class DescriptorServer:
    """Sends the descriptors of arenas to processes that connect.

    The socket lies in a directory of this user, so that no other user can connect.
    """

    def __init__(self, path: Path, descriptor: Callable[[int], int]) -> None:
        """``descriptor``: that of an arena, by its index; may raise PoolError."""
        self._path, self._descriptor = path, descriptor
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, name="pool-descriptors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for peer in connections(self._socket):
            with peer, suppress(OSError):  # the worker has died meanwhile
                peer.settimeout(TIMEOUT_S)
                wanted = peer.recv(MOST)
                try:
                    found = [self._descriptor(index) for index in wanted]
                except PoolError as error:
                    peer.sendall(str(error).encode())
                else:
                    socket.send_fds(peer, [b"d"], found)

    def close(self) -> None:
        """Stop."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)


def receive(path: Path, wanted: Sequence[int]) -> dict[int, int]:
    """Descriptors of this process for those of some arenas, by the index of the arena.

    Raises: PoolUnavailable if the server does not answer; PoolError if it cannot have an arena
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(TIMEOUT_S)
        try:
            link.connect(str(path))
            link.sendall(bytes(wanted))
            text, found, _, _ = socket.recv_fds(link, MOST_TEXT, MOST)
        except OSError as error:
            raise PoolUnavailable(f"no descriptors of arenas from {path}: {error}") from error
    if len(found) != len(wanted):
        for descriptor in found:
            os.close(descriptor)
        if text and not found:
            raise PoolError(text.decode(errors="replace"))
        raise PoolUnavailable(
            f"{len(found)} descriptors of arenas from {path}: expected {len(wanted)}"
        )
    return dict(zip(wanted, found, strict=True))
