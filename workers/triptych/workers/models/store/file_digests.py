"""SHA-256 of whole files, computed once and cached by what the file system says of the file."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from triptych.core.config.cache_dirs import writable_cache_dir
from triptych.workers.models.store.metadata_cache import write_atomically
from triptych.workers.models.store.safe_files import Progress, ignore_progress

CHUNK_BYTES = 8 << 20
SHOW_AFTER_S = 1.0
"""Progress is reported from then on."""
SETTLED_S = 2.0
"""A file changed less than this ago is hashed again: it may change once more within the resolution
of its time stamps."""


def digest_of(path: Path, progress: Progress = ignore_progress) -> str:
    """SHA-256 of every byte of a file, in hexadecimal.

    The digest is cached by path, device, inode, size, mtime and ctime; a program can set mtime
    back, but not ctime. A file on which nothing changed is not read again.

    Raises: OSError if the file cannot be read
    """
    path = path.resolve()
    record = writable_cache_dir() / "digests" / f"{hashlib.sha256(bytes(path)).hexdigest()}.json"
    before = _identity(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["identity"] == before:
            return str(known["sha256"])
    found = _hash(path, progress)
    if _identity(path) == before and _is_settled(path):
        with suppress(OSError):  # on a full disk the next process hashes the file again
            write_atomically(record, json.dumps({"identity": before, "sha256": found}))
    return found


def _identity(path: Path) -> list[object]:
    status = path.stat()
    return [
        str(path),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]


def _is_settled(path: Path) -> bool:
    status = path.stat()
    return time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S


def _hash(path: Path, progress: Progress) -> str:
    digest, began, done = hashlib.sha256(), time.monotonic(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if time.monotonic() - began > SHOW_AFTER_S:
                progress("hash", done, total)
    return digest.hexdigest()
