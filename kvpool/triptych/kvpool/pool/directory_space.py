"""Whether a directory that settings name can be had, and has the room, before anything starts."""

import os
from pathlib import Path

from triptych.core.errors import ConfigError


def free_bytes(setting: str, directory: Path) -> int:
    """Bytes that are free in a directory, which need not be there yet. Nothing is made or changed.

    Raises: ConfigError if this user cannot write there, or make it
    """
    above = next(path for path in (directory, *directory.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting}={directory}: {above} is no directory that this user can write to: "
            "make the directory for this user, or choose another"
        )
    space = os.statvfs(above)
    return space.f_bavail * space.f_frsize


def require_room(free: int, setting: str, directory: Path, size_setting: str, wanted: int) -> None:
    """Raise ConfigError if less is free than is wanted."""
    if free < wanted:
        raise ConfigError(
            f"{size_setting}={wanted}: {directory} has room for {free}: lower it, make room there, "
            f"or choose another {setting}"
        )
