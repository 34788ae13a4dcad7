"""What takes transformers seconds to find out about a model is kept, and found out once.

transformers alone knows how to make sense of whatever lies in a model's directory, and takes
seconds to import. What it said is kept under a name made of all that it read, so whoever needs
no more than that starts without it.
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


def kept(
    kind: str,
    model: Path,
    patterns: Iterable[str],
    maker: str,
    make: Callable[[], str],
    parse: Callable[[str], T],
) -> T:
    """What ``parse`` gives of a text that is kept, or else of a new one, which is kept from now.

    It is made of the files of ``model`` that match ``patterns``, by the code in the file ``maker``:
    made anew when one of them changes, or when what is kept cannot be read.

    Raises: what ``make`` raises; nothing is kept of that
    """
    path = cache_dir() / kind / f"{_key(model, patterns, maker)}.json"
    with suppress(OSError, ValueError, KeyError):  # none, or one that was cut short
        return parse(path.read_text(encoding="utf-8"))
    text = make()
    with suppress(OSError):  # a full or read-only disk costs time at the next start, no more
        _put(path, text)
    return parse(text)


def _key(model: Path, patterns: Iterable[str], maker: str) -> str:
    """Changes with whatever a thing is made of, and with whoever makes it."""
    makers = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    digest = hashlib.sha256(repr(makers).encode() + Path(maker).read_bytes())
    for path in sorted({path for pattern in patterns for path in model.glob(pattern)}):
        content = path.read_bytes()
        digest.update(repr((str(path.relative_to(model)), len(content))).encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _put(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
