"""Atomic files and directories: hashes, manifests, a lock, atomic replacement."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from triptych.core.errors import ModelError

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]
"""Progress callback: the stage, such as ``download``, bytes done, bytes in all."""


def ignore_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """The ``Progress`` of a caller that shows none."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_exactly(path: Path, size_bytes: int, sha256: str) -> bool:
    """Whether the file is there, of this size and with this hash."""
    return path.is_file() and path.stat().st_size == size_bytes and sha256_of(path) == sha256


def copy_stream(read: Callable[[int], bytes], target: Path, total: int, report: Progress) -> None:
    """Copy a stream to ``target``, reporting progress of the stage ``unpack``."""
    done = 0
    with target.open("wb") as file:
        while chunk := read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            report("unpack", done, total)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an advisory lock between processes; the system releases it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seal(directory: Path) -> None:
    """Write the manifest: size and hash of every file of the directory."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST
    }
    text = json.dumps({"version": 1, "files": files}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def put_in_place(finished: Path, target: Path) -> None:
    """Rename a sealed directory to its final path, atomically for readers."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(finished, target)


def is_sealed(directory: Path, *, verify: bool = False) -> bool:
    """Whether every file of the manifest exists with its size, and with ``verify`` its hash."""
    path = directory / MANIFEST
    if not path.is_file():
        return False
    for name, expected in read_manifest(path).items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            return False
        if verify and sha256_of(file) != expected["sha256"]:
            return False
    return True


def read_manifest(path: Path) -> dict[str, dict[str, object]]:
    """The ``files`` of a manifest.

    Raises: ModelError if it is not one
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        files = cast("dict[str, dict[str, object]]", body["files"])
        if not all({"bytes", "sha256"} <= entry.keys() for entry in files.values()):
            raise KeyError("bytes, sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a manifest ({error!r}): delete its directory") from error
    return files
