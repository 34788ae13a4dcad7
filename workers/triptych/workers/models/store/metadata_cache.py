"""On-disk cache of model metadata: traits and tokenizers that transformers has read.

Importing transformers takes seconds. Its results are stored under a hash of the files that it read,
so that later processes start without it.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from triptych.core.config.cache_dirs import cache_dir, writable_cache_dir

T = TypeVar("T")

DESCRIBING_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*/*.jinja")
"""Files of a model's directory that can define its computation and its tokenizer."""
_MODELS = Path(__file__).parents[1]


def cached(
    kind: str,
    model: Path,
    patterns: Iterable[str],
    make: Callable[[], str],
    parse: Callable[[str], T],
) -> T:
    """The parsed text from the cache, or from ``make``, which is then stored.

    The key is a hash of the files of ``model`` that match ``patterns`` and of all source files of
    ``workers.models``. An entry that cannot be read is made again.

    Raises: what ``make`` raises; nothing is stored then
    """
    name = f"{_key(model, patterns)}.json"
    for folder in dict.fromkeys((cache_dir(), writable_cache_dir())):
        with suppress(OSError, ValueError, KeyError):  # missing or truncated
            return parse((folder / kind / name).read_text(encoding="utf-8"))
    text = make()
    with suppress(OSError):  # on a full disk it is made again at the next start
        write_atomically(writable_cache_dir() / kind / name, text)
    return parse(text)


def _key(model: Path, patterns: Iterable[str]) -> str:
    """Hash of the model's files, and of the code and the versions of libraries that read them."""
    digest = hashlib.sha256(repr((reader_versions(), source_digest())).encode())
    digest.update(hash_files(model, patterns))
    return digest.hexdigest()[:32]


@cache
def reader_versions() -> tuple[str, ...]:
    """Versions of the libraries that decide what a model's files mean."""
    return tuple(f"{name} {version(name)}" for name in ("tokenizers", "transformers"))


@cache
def source_digest() -> str:
    """Hash of all source files of ``workers.models``."""
    sources = sorted(_MODELS.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def hash_files(model: Path, patterns: Iterable[str]) -> bytes:
    """Hash of the names and contents of the files of ``model`` that match ``patterns``."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in model.glob(pattern)}):
        content = path.read_bytes()
        digest.update(repr((str(path.relative_to(model)), len(content))).encode())
        digest.update(content)
    return digest.digest()


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, and make its directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
