"""Blocks of tokens that requests share: keys, pages, namespaces and publications."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from triptych.kvpool.pool.free_list import PageIds

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 of a block and all before it; names it in memory and on disk."""

PinId = NewType("PinId", int)

SoftPinId = NewType("SoftPinId", int)

Digest = Callable[[bytes], bytes]

TokenIds = Sequence[int] | NDArray[np.int32]

FormatPages = tuple[tuple[str, int], ...]
"""How many pages are of which format."""

Refusal = Literal["quota", "memory", "parent", "collision"]
"""Why a publish was refused: its tenant's quota, the total, a parent that is gone, or a block
whose key another block has."""

_MAX_TOKEN = 2**31 - 1


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that keys and values depend on, and the salt for sharing."""

    salt: bytes
    """Of the tenant; tenants share prefixes if, and only if, theirs are equal."""
    model: str
    revision: str
    profile: str
    """Digest of the codec profile and policy, so of what the bytes of a page mean."""
    block_tokens: int = 0
    """Tokens of a block; 0: as many as the cache's settings say. It follows from ``profile``, so it
    is not part of the digest."""
    window_blocks: int = 0
    """Last blocks of a prefix whose window entries a request needs beside all blocks; 0: blocks
    have none. It follows from ``profile`` too."""

    def encoded(self) -> bytes:
        """All fields, each with its length in front, so that no two namespaces look alike."""
        parts = [self.salt, *(text.encode() for text in (self.model, self.revision, self.profile))]
        return b"triptych prefix 1" + b"".join(len(p).to_bytes(8, "little") + p for p in parts)

    def digest(self) -> BlockKey:
        """The key of the parent of every first block."""
        return BlockKey(sha256(self.encoded()))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One resident block, or its window entry. It never changes: requests share its pages.

    The window entry of a block has the pages of layers with a sliding window. It is a child of its
    block without tokens of its own, and nothing follows it.
    """

    key: BlockKey
    parent: BlockKey
    """Of a first block: the digest of the namespace."""
    namespace: Namespace
    tokens: bytes
    """Token ids, little-endian int32, of this block alone; empty: a window entry of its parent."""
    pages: PageIds
    """Opaque to the index. Read only."""
    nbytes: int
    seconds: float
    """Seconds to compute it, given all blocks before it."""
    tenant: str
    """The tenant that published it first, whose quota it counts against."""


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One block to publish: pages, size, and seconds to compute."""

    pages: PageIds
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"a block of {self.nbytes} bytes that took {self.seconds} s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """Blocks to add to the cache: the last ``len(blocks)`` blocks of ``tokens``, or window entries
    of blocks that are cached."""

    namespace: Namespace
    tokens: TokenIds
    """Whole blocks."""
    blocks: Sequence[PageIds]
    """Pages of each block."""
    seconds: float
    """Seconds to compute one block."""
    tenant: str
    """The tenant whose quota they count against."""
    formats: Sequence[FormatPages] = ()
    """Pages of each block by format; none: not stated."""
    are_windows: bool = False
    """Whether these are the window entries of the blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A chain of blocks, from the first, that stays resident until it is released."""

    id: PinId
    blocks: tuple[Block, ...]
    windows: tuple[Block, ...] = ()
    """Window entries of some of them, which stay as long."""


@dataclass(frozen=True, slots=True)
class SoftPin:
    """A chain of blocks, from the first, that is evicted after all blocks without a soft pin.

    So are the window entries that a request with this prefix needs.
    """

    id: SoftPinId
    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Result of a publication.

    The pages of the last ``added`` payloads are the index's now. The others stay the
    caller's, who frees them: of a refused publish all, else those of known blocks. The pages of
    ``evicted`` are the caller's again.
    """

    new: tuple[Block, ...] = ()
    """The blocks, or window entries, that were added."""
    pin: Pin | None = None
    """A pin on the whole chain and on the window entries of the payloads, if it was not refused:
    the publisher still reads them."""
    evicted: tuple[Block, ...] = ()
    """In the order in which they went: no block before its children."""
    refused: Refusal | None = None

    @property
    def added(self) -> int:
        return len(self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that the index may keep."""

    total_bytes: int
    tenant_bytes: int
    """The quota of a tenant that ``by_tenant`` does not name."""
    by_tenant: Mapping[str, int] = field(default_factory=dict[str, int])

    def of(self, tenant: str) -> int:
        return self.by_tenant.get(tenant, self.tenant_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStats:
    """Statistics of the index; fields after ``pins`` count since the start."""

    blocks: int
    windows: int
    """Window entries of blocks."""
    nbytes: int
    """Of both."""
    reserved_bytes: int
    """For blocks that are on their way."""
    pinned_bytes: int
    bytes_by_tenant: dict[str, int]
    """Reserved ones included."""
    reserved_by_tenant: dict[str, int]
    pins: int
    hits: int
    """Lookups that found at least one block."""
    misses: int
    asked_tokens: int
    hit_tokens: int
    added: int
    evictions: int
    refused: dict[Refusal, int]
    collisions: int
    """Keys that led to a block with other tokens: a miss each, and never seen with SHA-256."""


def encode(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32.

    Raises: ValueError if one is no integer in [0, 2 ** 31)
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() <= _MAX_TOKEN:
        raise ValueError("token ids: expected a list of integers from 0 to 2 ** 31 - 1")
    return ids.astype("<i4").tobytes()


def decode(encoded: bytes) -> NDArray[np.int32]:
    """Undo ``encode``.

    Raises: ValueError if these are no token ids
    """
    if len(encoded) % 4:
        raise ValueError(f"{len(encoded)} bytes of token ids: expected int32")
    ids = np.frombuffer(encoded, "<i4").astype(np.int32)
    if ids.min(initial=0) < 0:
        raise ValueError("a token id below 0")
    return ids


def cut(encoded: bytes, block_tokens: int) -> list[bytes]:
    """The whole blocks of encoded tokens."""
    step = 4 * block_tokens
    return [encoded[at : at + step] for at in range(0, len(encoded) - step + 1, step)]


def chain_keys(
    namespace: Namespace, blocks: Sequence[bytes], digest: Digest = sha256
) -> Iterator[BlockKey]:
    """The key of the namespace, then that of each block of the chain.

    A key hashes the key before it and the tokens of the block, each with its length in front.
    """
    key = BlockKey(digest(namespace.encoded()))
    yield key
    for tokens in blocks:
        key = child_key(key, tokens, digest)
        yield key


def child_key(parent: BlockKey, tokens: bytes, digest: Digest = sha256) -> BlockKey:
    """The key of the block with these tokens after ``parent``."""
    lengths = len(parent).to_bytes(8, "little"), len(tokens).to_bytes(8, "little")
    return BlockKey(digest(lengths[0] + parent + lengths[1] + tokens))
