"""Directories of caches, which a process finds under any user id, with or without a home."""

import logging
import os
import pwd
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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


def set_library_environment() -> None:
    """Set ``library_environment`` for this process and its children."""
    os.environ.update(library_environment())


def set_environment_defaults(values: Mapping[str, str]) -> None:
    """Set variables of this process and its children; those that are set stay as they are."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def environment_variable(name: str) -> str:
    """A variable of a library; empty if it is not set."""
    return os.environ.get(name, "")


def library_environment() -> dict[str, str]:
    """Variables that let libraries work where the home directory is missing or read-only.

    Ray writes a token there, Triton its compiled kernels. Variables that are set stay as they are.
    """
    wanted = dict[str, str]()
    try:
        home_is_writable = can_write(Path.home())
    except RuntimeError:
        home_is_writable = False
        wanted["HOME"] = str(writable_cache_dir())
    if not home_is_writable:
        wanted["RAY_AUTH_TOKEN_PATH"] = str(_ray_token())
        wanted["TRITON_CACHE_DIR"] = str(writable_cache_dir() / "triton")
    if not _has_name(os.getuid()):  # getpass.getuser raises
        wanted["USER"] = f"uid-{os.getuid()}"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _ray_token() -> Path:
    """A file with a token for Ray's ports; Ray makes one in the home directory only."""
    path = writable_cache_dir() / "ray_auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path


def _has_name(user: int) -> bool:
    try:
        return bool(pwd.getpwuid(user))
    except KeyError:
        return any(os.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))


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
