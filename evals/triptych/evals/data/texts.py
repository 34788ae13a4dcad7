"""Texts from Python's standard library, cut into documents for calibration, evaluation and test.

Prose: ``pydoc_data.topics``, the language reference as Python carries it for ``help()``. Code:
modules of the standard library. Both are under the PSF licence, which allows use and copies;
nothing is downloaded and nothing is stored here. Every source belongs to one split, so a
profile calibrated on one split uses no line of the others.

Settings are chosen on ``calibration``. ``evaluation`` has the texts of the gates and of studies
that compare methods during development. ``test`` is for reported figures only: no choice of any
kind has used its texts.
"""

import hashlib
import importlib
import inspect
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import Literal

from triptych.core.errors import ConfigError

Split = Literal["calibration", "evaluation", "test"]
Encode = Callable[[str], list[int]]

CODE: dict[Split, tuple[str, ...]] = {
    "evaluation": ("argparse", "inspect", "subprocess", "ipaddress", "dataclasses", "statistics"),
    "calibration": ("typing", "tarfile", "doctest", "enum", "threading", "configparser"),
    "test": ("difflib", "mailbox", "unittest.mock", "pickletools", "optparse", "imaplib"),
}
"""Modules that are one large file in every Python version from 3.11 on."""

EVALUATION_TOPICS = 4
"""Of the topics that calibration does not use, ``evaluation`` has this many, the largest."""

DUPLICATE_LIMIT = 0.1
"""A topic with a larger share of known paragraphs is left out as a duplicate."""


@dataclass(frozen=True)
class Document:
    """A context to compress, and the text after it."""

    name: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@cache
def prose(split: Split) -> str:
    """Topics of a split, joined.

    Some topics repeat sections of others. A topic that shares paragraphs with an earlier one
    is left out, so that no two splits share any. Of the others, every second one is for
    calibration; the rest are divided by ``EVALUATION_TOPICS``.
    """
    kept = list[str]()
    known = set[str]()
    by_size = sorted(pydoc_data.topics.topics.items(), key=lambda item: (-len(item[1]), item[0]))
    for _, text in by_size:
        paragraphs = {part.strip() for part in text.split("\n\n") if len(part.strip()) > 40}
        if len(paragraphs & known) <= DUPLICATE_LIMIT * len(paragraphs):
            kept.append("\n\n".join(p for p in text.split("\n\n") if p.strip() not in known))
        known |= paragraphs
    chosen: dict[Split, list[str]] = {
        "calibration": kept[1::2],
        "evaluation": kept[0::2][:EVALUATION_TOPICS],
        "test": kept[0::2][EVALUATION_TOPICS:],
    }
    return "\n\n".join(chosen[split])


def sources(split: Split) -> list[tuple[str, str]]:
    """Name and text of each source of a split, prose first."""
    modules = [importlib.import_module(name) for name in CODE[split]]
    code = [(module.__name__, inspect.getsource(module)) for module in modules]
    return [("pydoc", prose(split)), *code]


def text_hash(split: Split) -> str:
    """Hash of all texts of a split: Python versions differ in their texts."""
    joined = "\0".join(text for _, text in sources(split))
    return hashlib.sha256(joined.encode()).hexdigest()[:12]


def documents(
    encode: Encode, split: Split, *, context: int, continuation: int, count: int, seed: int = 0
) -> list[Document]:
    """Cut ``count`` disjoint documents, alternating between prose and code.

    Each ``seed`` above 0 has other cuts and another order of documents; documents of two seeds may
    overlap in part.

    Units:   ``context`` and ``continuation`` in tokens
    Raises:  ConfigError if the split holds too little text
    """
    (first, text), *code = sources(split)
    size = context + continuation
    rng = random.Random(seed) if seed else None
    if rng:
        rng.shuffle(code)
    piles = [
        _cut(first, encode(text), context, size, rng),
        _interleave([_cut(name, encode(body), context, size, rng) for name, body in code]),
    ]
    found = list(_interleave(piles))
    if len(found) < count:
        raise ConfigError(
            f"{count} documents of {size} tokens: the {split} texts hold {len(found)}; "
            "ask for fewer documents or a shorter context"
        )
    return found[:count]


def _cut(
    name: str, tokens: Sequence[int], context: int, size: int, rng: random.Random | None
) -> Iterator[Document]:
    spare = len(tokens) - size
    first = rng.randrange(max(1, min(size, spare))) if rng else 0
    starts = list(range(first, spare + 1, size))
    if rng:
        rng.shuffle(starts)
    for start in starts:
        middle, end = start + context, start + size
        yield Document(f"{name}@{start}", tuple(tokens[start:middle]), tuple(tokens[middle:end]))


def _interleave(piles: Sequence[Iterator[Document]]) -> Iterator[Document]:
    rounds = chain.from_iterable(zip_longest(*piles))
    return (document for document in rounds if document is not None)
