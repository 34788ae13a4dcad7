"""Nodes of the prefix index: blocks with their pins and window entries, and a tenant's bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.kvpool.prefix.blocks import Block, Namespace, Pin, PinId
from triptych.kvpool.prefix.eviction import LeafHeap, Rank

UNUSED = -math.inf
"""Worth of what no request is known to need: it is evicted first, the oldest before others."""


@dataclass(slots=True, eq=False)
class Node:
    """A resident block, or the window entry of one."""

    block: Block
    parent: "Node | None"
    worth: float
    """The policy's value: blocks with the lowest are evicted first."""
    window: "Node | None" = None
    """The window entry of the block; None: it has none, or it was evicted."""
    children: int = 0
    """Blocks that follow it, and its window entry."""
    pins: int = 0
    soft_pins: int = 0
    stamp: int = 0
    """Number of its entry in the heaps of leaves; 0: it may not be evicted."""

    @property
    def rank(self) -> Rank:
        return self.soft_pins > 0, self.worth

    @property
    def is_window(self) -> bool:
        """Whether it is the window entry of its parent."""
        return not self.block.tokens

    @property
    def is_end(self) -> bool:
        """Whether no block follows it."""
        return self.children == (self.window is not None)

    def continues(self, parent: "Node | None", namespace: Namespace, tokens: bytes) -> bool:
        """Whether it is this block after that parent; keys alone may collide."""
        if self.parent is not parent or self.block.tokens != tokens:
            return False
        return parent is not None or self.block.namespace == namespace

    def chain(self) -> Iterator["Node"]:
        """Itself, its parent, and so on up to the first block."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Pinned:
    """The nodes of a pin: a chain of blocks, and window entries of some of them."""

    tail: Node
    windows: tuple[Node, ...] = ()

    def __iter__(self) -> Iterator[Node]:
        yield from self.windows
        yield from self.tail.chain()

    def pin(self, pin: PinId) -> Pin:
        blocks = tuple(node.block for node in self.tail.chain())[::-1]
        return Pin(pin, blocks, tuple(node.block for node in self.windows))


def windows_of(blocks: Sequence[Node]) -> tuple[Node, ...]:
    """The window entries of blocks, without those that are gone."""
    return tuple(node.window for node in blocks if node.window is not None)


def windows_at_end(chain: Sequence[Node], window_blocks: int) -> tuple[Node, ...]:
    """The window entries that a request needs which has this prefix, as far as they are there."""
    return windows_of(chain[max(0, len(chain) - window_blocks) :])


def usable_lengths(has_window: Sequence[bool], window_blocks: int) -> Iterator[int]:
    """The lengths of a prefix that requests can use, ascending: their last ``window_blocks`` blocks
    have window entries.

    >>> list(usable_lengths([True, False, True, True, True], 2))
    [1, 4, 5]
    """
    run = 0
    for length, has in enumerate(has_window, 1):
        run = run + 1 if has else 0
        if run >= min(length, window_blocks):
            yield length


@dataclass(slots=True)
class Account:
    """Blocks and bytes of one tenant, or of all."""

    blocks: int = 0
    """Window entries included."""
    nbytes: int = 0
    idle_bytes: int = 0
    """Of blocks without a pin."""
    leaves: LeafHeap[Node] = field(default_factory=LeafHeap[Node])
    """Idle blocks without children: those that may be evicted now."""

    def faults(self, nodes: Sequence[Node], reserved: int) -> list[str]:
        """Where it differs from the blocks that it should sum up."""
        idle = sum(n.block.nbytes for n in nodes if not n.pins)
        sums = len(nodes), sum(n.block.nbytes for n in nodes) + reserved, idle
        faults = list[str]()
        recorded = self.blocks, self.nbytes, self.idle_bytes
        if sums != recorded:
            faults.append(f"blocks, bytes, idle bytes are {recorded}: {sums}")
        leaves, should = self.leaves.live(), [node for node in nodes if node.stamp]
        if len(leaves) != len(should) or {id(n) for n in leaves} != {id(n) for n in should}:
            faults.append("its heap does not hold the blocks that may be evicted")
        return faults
