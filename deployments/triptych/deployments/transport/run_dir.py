"""The private directory of a running application: its sockets, and who still uses them."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Self

from triptych.core.errors import ConfigError

logger = logging.getLogger(__name__)

POOL_SOCKETS = "pool*.sock"
"""One for each cell of an application (``AppPlan.named``)."""
_LOCK = "lock"


def base_dir() -> Path:
    """Where this user's applications have their directories.

    It is short and in the temporary directory, since the path of a socket ends at 107 bytes.
    """
    return Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}"


def new_run_dir() -> Path:
    """A path that no application has had. ``RunDir.enter`` makes the directory."""
    return base_dir() / f"app-{secrets.token_hex(4)}"


def pool_sockets() -> list[Path]:
    """Sockets of the pools of this user's applications, dead ones among them."""
    return sorted(base_dir().glob(f"app-*/{POOL_SOCKETS}"))


class RunDir:
    """One process's stay in the directory of its application.

    Every process of the application shares a file lock there for as long as it lives. The
    kernel takes the lock from a process whichever way it dies, so a directory whose lock
    nobody shares is an orphan. The last process to leave removes it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def enter(cls, path: Path) -> Self:
        """Make the directory if it is not there, for this user alone, and stay in it.

        Raises: ConfigError if the directory around it belongs to somebody else
        """
        while True:
            _make_private(path.parent)
            with contextlib.suppress(FileExistsError):  # mkdir(exist_ok) would look again, too late
                path.mkdir(mode=0o700)
            try:
                descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last one before us removed the directory just now
                continue
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return cls(path, descriptor)
            os.close(descriptor)

    @contextlib.contextmanager
    def only_one(self, role: str) -> Generator[None]:
        """Be the only process in that role here; wait until a former one has ended.

        The kernel ends the wait whichever way that one dies.
        """
        descriptor = os.open(
            self.path / f"{role}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        """Leave; if nobody else is there, the directory goes too. Once is enough."""
        if self._descriptor >= 0:
            _remove_if_unused(self.path, self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_orphans() -> list[Path]:
    """Remove the directories of this user's applications that died, and return their paths."""
    removed = list[Path]()
    for path in base_dir().glob("app-*"):
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # somebody is just making it, or it is none of ours
            continue
        if _remove_if_unused(path, descriptor):
            removed.append(path)
            logger.info("removed %s of an application that is dead", path)
        os.close(descriptor)
    return removed


def find_orphans() -> list[Path]:
    """The directories of this user's applications that died."""
    found = list[Path]()
    for path in sorted(base_dir().glob("app-*")):
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(BlockingIOError):  # somebody lives there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        os.close(descriptor)
    return found


def check_base_dir() -> None:
    """Raise ConfigError unless applications of this user can have their directories."""
    _make_private(base_dir())


def _remove_if_unused(path: Path, descriptor: int) -> bool:
    """Remove the directory if this process alone has its lock; the lock is gone either way."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True


def _make_private(base: Path) -> None:
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if status.st_uid != os.getuid() or not is_private:
        raise ConfigError(
            f"{base}: expected a directory of yours with mode 0700: remove it, or set TMPDIR"
        )
