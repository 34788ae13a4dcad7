"""A loop that accepts connections of a listening socket, and goes on after errors of ``accept``."""

import errno
import logging
import socket
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

PAUSE_S = 0.1
"""Pause after an error, such as too many open files."""
_CLOSED = (errno.EINVAL, errno.EBADF)
"""Errors of a socket that was shut down or closed."""


def connections(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections in the order in which they come, until the listener is closed.

    Other errors pass: if they ended it, clients would connect and get no answer.
    """
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            logger.warning("a connection was not accepted: %s", error)
            time.sleep(PAUSE_S)
        else:
            yield connection
