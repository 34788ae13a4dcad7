"""Directories of caches, which a process finds under any user id, with or without a home."""

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from triptych.core.errors import ConfigError

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The cache to read: ``TRIPTYCH_CACHE_DIR``, else ``~/.cache/triptych``.

    It may be read-only, as in a container image. Without a home directory it is the writable one.
    """
    return _configured() or writable_cache_dir()


def writable_cache_dir() -> Path:
    """The cache to write: ``cache_dir``, or a private directory below the temporary one.

    Raises: ConfigError if that directory belongs to another user
    """
    return _writable(_configured(), Path(tempfile.gettempdir()))


def can_write(path: Path) -> bool:
    """Whether files can be made in a directory, which need not exist yet."""
    there = next((each for each in (path, *path.parents) if each.exists()), path)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _configured() -> Path | None:
    """None: the variable is not set, and the user has no home directory."""
    named = os.environ.get("TRIPTYCH_CACHE_DIR")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "triptych"
    except RuntimeError:  # HOME is not set, and the user id has no entry in passwd
        return None


@cache
def _writable(configured: Path | None, temporary: Path) -> Path:
    if configured is not None and can_write(configured):
        return configured
    path = temporary / f"triptych-cache-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    _require_private(path)
    reason = "there is no home directory"
    if configured is not None:
        reason = f"{configured} cannot be written"
    logger.warning("caches are written to %s, since %s: set TRIPTYCH_CACHE_DIR", path, reason)
    return path


def _require_private(path: Path) -> None:
    """Cached machine code runs when it is loaded: no other user may write it."""
    status = path.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o022
    if status.st_uid != os.getuid() or not is_private:
        raise ConfigError(
            f"{path}: expected a directory of yours that nobody else may write: remove it, or set "
            "TRIPTYCH_CACHE_DIR to a directory that can be written"
        )
