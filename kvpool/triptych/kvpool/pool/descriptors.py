"""Passes open file descriptors from the pool to its workers, over a Unix socket."""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from triptych.core.errors import PoolUnavailable
from triptych.kvpool.pool.listener import connections

TIMEOUT_S = 30.0
MOST = 64
"""Most descriptors of a pool."""


def descriptors_path(address: str) -> Path:
    """Where the descriptors of a pool are: beside its Unix socket."""
    return Path(address.removeprefix("unix:")).with_suffix(".fds")


class DescriptorServer:
    """Sends the same descriptors to each process that connects.

    The socket lies in a directory of this user, so that no other user can connect.
    """

    def __init__(self, path: Path, descriptors: Sequence[int]) -> None:
        self._path, self._descriptors = path, list(descriptors)
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
                socket.send_fds(peer, [b"d"], self._descriptors)

    def close(self) -> None:
        """Stop, and close the descriptors of this process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)


def receive(path: Path, count: int) -> list[int]:
    """Descriptors of this process for those of the server.

    Raises: PoolUnavailable if the server does not answer, or has another number
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(TIMEOUT_S)
        try:
            link.connect(str(path))
            _, found, _, _ = socket.recv_fds(link, 1, MOST)
        except OSError as error:
            raise PoolUnavailable(f"no descriptors of arenas from {path}: {error}") from error
    if len(found) != count:
        for descriptor in found:
            os.close(descriptor)
        raise PoolUnavailable(f"{len(found)} descriptors of arenas from {path}: expected {count}")
    return found
