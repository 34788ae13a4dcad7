"""On-disk cache of model metadata: traits and tokenizers that transformers has read.

Importing transformers takes seconds. Its results are stored under a hash of the files that it read,
so that later processes start without it.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from triptych.core.config import cache_dir

T = TypeVar("T")


def cached(
    kind: str,
    model: Path,
    patterns: Iterable[str],
    maker: str,
    make: Callable[[], str],
    parse: Callable[[str], T],
) -> T:
    """The parsed text from the cache, or from ``make``, which is then stored.

    The key is a hash of the files of ``model`` that match ``patterns`` and of the source file
    ``maker``. An entry that cannot be read is made again.

    Raises: what ``make`` raises; nothing is stored then
    """
    path = cache_dir() / kind / f"{_key(model, patterns, maker)}.json"
    with suppress(OSError, ValueError, KeyError):  # missing or truncated
        return parse(path.read_text(encoding="utf-8"))
    text = make()
    with suppress(OSError):  # on a full or read-only disk it is made again at the next start
        _write_atomically(path, text)
    return parse(text)


def _key(model: Path, patterns: Iterable[str], maker: str) -> str:
    """Hash of the model's files, the source file and the versions of the libraries."""
    makers = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    digest = hashlib.sha256(repr(makers).encode() + Path(maker).read_bytes())
    for path in sorted({path for pattern in patterns for path in model.glob(pattern)}):
        content = path.read_bytes()
        digest.update(repr((str(path.relative_to(model)), len(content))).encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
