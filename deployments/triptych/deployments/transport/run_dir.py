"""The private directory of a running application, with its sockets and a lock per process."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Self

from triptych.core.errors import ConfigError

logger = logging.getLogger(__name__)

POOL_SOCKETS = "pool*.sock"
"""One pool socket for each shard of an application (``AppPlan.named``)."""
LEFT_OVER_WAIT_S = 3.0
"""How long a stopped server waits for its last processes, to remove their directory."""
_LOCK = "lock"


def base_dir() -> Path:
    """The parent of the run directories of this user's applications.

    It is a short path in the temporary directory, since a socket path has at most 107 bytes.
    """
    return Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}"


def new_run_dir() -> Path:
    """A new unique path. ``RunDir.enter`` creates the directory."""
    return base_dir() / f"app-{secrets.token_hex(4)}"


def pool_sockets() -> list[Path]:
    """Pool sockets of this user's applications, including those of dead ones."""
    return sorted(base_dir().glob(f"app-*/{POOL_SOCKETS}"))


class RunDir:
    """A process's shared lock on the run directory of its application.

    Every process of the application holds a shared file lock there while it runs. The kernel
    releases the lock however a process dies, so a directory whose lock no process holds is an
    orphan. The last process to leave removes the directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def enter(cls, path: Path) -> Self:
        """Create the directory if necessary, private to this user, and take its shared lock.

        Raises: ConfigError if the parent directory belongs to another user
        """
        while True:
            _make_private(path.parent)
            with contextlib.suppress(FileExistsError):  # mkdir(exist_ok) checks again, too late
                path.mkdir(mode=0o700)
            try:
                descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last process to leave removed the directory just now
                continue
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return cls(path, descriptor)
            os.close(descriptor)

    @contextlib.contextmanager
    def only_one(self, role: str) -> Generator[None]:
        """Hold the exclusive lock of a role; waits until the process that has it ends.

        The kernel releases the lock however that process dies.
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
        """Release the lock; the last process removes the directory. Repeated calls do nothing."""
        if self._descriptor >= 0:
            _remove_if_unused(self.path, self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_orphans() -> list[Path]:
    """Remove run directories of this user's dead applications; returns their paths."""
    removed = list[Path]()
    for path in all_run_dirs():
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is just being created, or belongs to another user
            continue
        if _remove_if_unused(path, descriptor):
            removed.append(path)
            logger.info("removed run directory %s of a dead application", path)
        os.close(descriptor)
    return removed


def all_run_dirs() -> set[Path]:
    """Run directories of this user's applications, including those of dead ones."""
    return set(base_dir().glob("app-*"))


def remove_left_over(before: set[Path], wait_s: float = LEFT_OVER_WAIT_S) -> None:
    """Remove the directories made since ``before``, whose application has ended.

    Ray kills processes that do not end in time, and those leave their directory. Waits up to
    ``wait_s`` for processes that are still ending.
    """
    deadline = time.monotonic() + wait_s
    while remaining := all_run_dirs() - before:
        remove_orphans()
        if not all_run_dirs() & remaining or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def find_orphans() -> list[Path]:
    """Run directories of this user's dead applications."""
    found = list[Path]()
    for path in sorted(all_run_dirs()):
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(BlockingIOError):  # a process holds the lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        os.close(descriptor)
    return found


def check_base_dir() -> None:
    """Raise ConfigError if run directories cannot be created for this user."""
    _make_private(base_dir())


def _remove_if_unused(path: Path, descriptor: int) -> bool:
    """Remove the directory if no other process holds its lock; this process's lock is released."""
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
