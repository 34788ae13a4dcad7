"""Index of cached prefixes: a hash chain over blocks of tokens, with quotas and eviction."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice

from triptych.core.errors import PoolError
from triptych.kvpool.prefix.blocks import (
    Block,
    BlockKey,
    Digest,
    IndexStats,
    Limits,
    Namespace,
    Payload,
    Pin,
    PinId,
    Published,
    Refusal,
    SoftPin,
    SoftPinId,
    TokenIds,
    chain_keys,
    child_key,
    cut,
    encode,
    sha256,
)
from triptych.kvpool.prefix.eviction import CostPolicy, EvictionPolicy
from triptych.kvpool.prefix.nodes import (
    UNUSED,
    Account,
    Node,
    Pinned,
    usable_lengths,
    windows_at_end,
    windows_of,
)


class PrefixIndex:
    """The state of shared prefixes, without bytes, clock or lock.

    A prefix is a chain of blocks of ``block_tokens`` tokens, or of as many as its namespace says.
    The key of a block hashes the key of its parent and its tokens, so a chain is found with one
    look-up per block. A key is only a hint: every hit compares all tokens and the parent itself, so
    a collision is a miss.

    A pin covers all blocks of its chain. So the blocks after an idle block are idle too, and all
    idle bytes can be evicted, leaves first. Only across tenants that share a salt is there an
    exception: a tenant's block may have children that count against another tenant's quota.

    A block may have a window entry: a child that nothing follows, so it is found through its block
    and may be evicted while the block stays. A request needs all blocks of its prefix, and window
    entries of the last ``window_blocks`` of its namespace: a prefix is usable up to the last block
    where they are all there. Others serve prompts that leave the prefix earlier. They are evicted
    before everything else, unless a request has used them.

    A soft pin is weaker: the blocks of its chain may be evicted, but only after all blocks without
    one. So soft pins never reserve memory, and no account of bytes contains them.

    A call that is refused or raises has changed nothing.

    Source: vLLM (hash chain over blocks, and a prefix that ends where all groups of layers have
        their blocks); Marconi (entries at the ends of sequences are worth most); the quotas, the
        full compare and the order of eviction are ours
    """

    def __init__(
        self,
        block_tokens: int,
        limits: Limits,
        policy: EvictionPolicy = CostPolicy(),  # noqa: B008 - frozen
        *,
        digest: Digest = sha256,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens")
        self.block_tokens, self.limits = block_tokens, limits
        self._policy, self._digest = policy, digest
        self._nodes = dict[BlockKey, Node]()
        self._pins = dict[PinId, Pinned]()
        self._soft_pins = dict[SoftPinId, Pinned]()
        """Blocks and window entries with a soft pin, whether they were evicted since or not."""
        self._all = Account()
        self._tenants = dict[str, Account]()
        self._reserved = Counter[str]()
        """Bytes that are reserved for blocks that are being loaded, by tenant."""
        self._windows = 0
        """Number of window entries."""
        self._tick = self._last_stamp = self._last_pin = self._last_soft_pin = 0
        self._count = Counter[str]()
        self._refused = Counter[Refusal]()

    # -------------------------------------------------------------- readers

    def block_tokens_of(self, namespace: Namespace) -> int:
        """Tokens of a block of a namespace."""
        return namespace.block_tokens or self.block_tokens

    def cut(self, namespace: Namespace, tokens: TokenIds) -> list[bytes]:
        """The whole blocks of tokens, encoded."""
        return cut(encode(tokens), self.block_tokens_of(namespace))

    def keys(self, namespace: Namespace, tokens: TokenIds) -> list[BlockKey]:
        """The keys of all whole blocks, resident or not."""
        pieces = self.cut(namespace, tokens)
        return list(chain_keys(namespace, pieces, self._digest))[1:]

    def lookup(self, namespace: Namespace, tokens: TokenIds) -> tuple[Block, ...]:
        """The longest usable chain that the prompt starts with; nothing is pinned or counted.

        Whole blocks only, and never the whole prompt: whoever asks needs at least one token
        left to compute, because it wants the logits after the last.
        """
        chain = self._usable(namespace, self.cut(namespace, tokens[:-1]))
        return tuple(node.block for node in chain)

    def resident(self, namespace: Namespace, tokens: TokenIds) -> int:
        """How many blocks of the prompt are resident, in a chain from the first; only a look."""
        return len(self._walk(namespace, self.cut(namespace, tokens)))

    def windows(self, namespace: Namespace, tokens: TokenIds) -> tuple[bool, ...]:
        """Of each resident block of the prompt, whether its window entry is; only a look."""
        chain = self._walk(namespace, self.cut(namespace, tokens))
        return tuple(node.window is not None for node in chain)

    def window_key(self, block: BlockKey) -> BlockKey:
        """The key of the window entry of a block, resident or not."""
        return child_key(block, b"", self._digest)

    def block(self, key: BlockKey) -> Block | None:
        """The resident block with this key."""
        node = self._nodes.get(key)
        return node.block if node else None

    def pin(self, key: BlockKey) -> Pin | None:
        """Pin the chain that ends with a block; nothing is counted, and None if it is gone."""
        node = self._nodes.get(key)
        return self._pin(Pinned(node)) if node else None

    def pin_all(self, namespace: Namespace, tokens: TokenIds) -> Pin | None:
        """Pin the chain of all whole blocks of these tokens, without window entries; nothing is
        counted, and None if one of them is not resident, or there is none."""
        pieces = self.cut(namespace, tokens)
        chain = self._walk(namespace, pieces)
        return self._pin(Pinned(chain[-1])) if chain and len(chain) == len(pieces) else None

    def held(self, pin: PinId) -> tuple[Block, ...]:
        """The blocks of a pin.

        Raises: KeyError if it ended before
        """
        return self._pins[pin].pin(pin).blocks

    def acquire(self, namespace: Namespace, tokens: TokenIds) -> Pin | None:
        """Look up as ``lookup`` does, count it, and pin what is found; None for a miss."""
        self._tick += 1
        chain = self._usable(namespace, self.cut(namespace, tokens[:-1]))
        self._count["asked_tokens"] += len(tokens)
        self._count["hit_tokens"] += len(chain) * self.block_tokens_of(namespace)
        self._count["hits" if chain else "misses"] += 1
        if not chain:
            return None
        windows = windows_at_end(chain, namespace.window_blocks)
        pin = self._pin(Pinned(chain[-1], windows))
        self._touch([*chain, *windows])
        return pin

    def release(self, pin: PinId) -> None:
        """Release a pin.

        Raises: PoolError if it ended before
        """
        pinned = self._pins.pop(pin, None)
        if pinned is None:
            raise PoolError(f"hold {pin} of a prefix was released before")
        for each in pinned:
            each.pins -= 1
            if each.pins == 0:
                self._add_idle(each, each.block.nbytes)
                self._offer(each)

    def soft_pin(self, namespace: Namespace, tokens: TokenIds, most_bytes: int) -> SoftPin | None:
        """Soft-pin the usable prefix of these tokens: it is evicted after all other blocks.

        It covers as many of the first blocks as ``most_bytes`` allow; None if that is not one.
        """
        chain = self._walk(namespace, self.cut(namespace, tokens))
        best, nbytes, before = None, 0, [0, *accumulate(node.block.nbytes for node in chain)]
        for length in usable_lengths([bool(n.window) for n in chain], namespace.window_blocks):
            windows = windows_at_end(chain[:length], namespace.window_blocks)
            size = before[length] + sum(node.block.nbytes for node in windows)
            if size <= most_bytes:
                best, nbytes = Pinned(chain[length - 1], windows), size
        if best is None:
            return None
        self._last_soft_pin += 1
        soft_pin = SoftPin(SoftPinId(self._last_soft_pin), len(list(best.tail.chain())), nbytes)
        self._soft_pins[soft_pin.id] = best
        self._add_soft_pins(best, 1)
        return soft_pin

    def soft_unpin(self, soft_pin: SoftPinId) -> None:
        """Remove a soft pin; the rest of the chain is evicted as any other.

        Raises: KeyError if it ended before
        """
        self._add_soft_pins(self._soft_pins.pop(soft_pin), -1)

    @property
    def soft_pins(self) -> set[SoftPinId]:
        """Those that have not ended."""
        return set(self._soft_pins)

    def _add_soft_pins(self, pinned: Pinned, count: int) -> None:
        for node in pinned:
            was, node.soft_pins = node.rank, node.soft_pins + count
            if node.stamp and node.rank != was:
                self._offer(node)

    # -------------------------------------------------------------- writers

    def publish(
        self, namespace: Namespace, tokens: TokenIds, payloads: Sequence[Payload], *, tenant: str
    ) -> Published:
        """Add the last ``len(payloads)`` blocks of ``tokens``, which are whole blocks.

        The blocks before them must be resident. Some of the payloads may be known already; the
        rest is added whole or, if it cannot fit, refused whole. To fit, blocks are evicted:
        the tenant's own if it would be over its quota, then those of the tenant with the most
        bytes, lowest rank first.

        Raises: ValueError if the tokens are not whole blocks, or fewer blocks than payloads
        """
        pieces = self._to_publish(namespace, tokens, payloads)
        before = len(pieces) - len(payloads)
        keys = list(chain_keys(namespace, pieces, self._digest))
        chain = self._walk(namespace, pieces)
        if len(chain) < before:
            return self._refuse("parent")
        if self._collide(keys[len(chain) + 1 :]):
            return self._refuse("collision")
        known, new, parent = len(chain), list[Node](), chain[-1] if chain else None
        for at in range(known, len(pieces)):
            block = _new_block(
                keys[at : at + 2], namespace, pieces[at], payloads[at - before], tenant
            )
            parent = Node(block, parent, self._rank(block))
            new.append(parent)
        keep = Pinned(chain[-1]) if chain else None
        return self._add(new, tenant, keep, Pinned([*chain, *new][-1]), used=chain[before:])

    def publish_windows(
        self, namespace: Namespace, tokens: TokenIds, payloads: Sequence[Payload], *, tenant: str
    ) -> Published:
        """Add window entries of the last ``len(payloads)`` blocks of ``tokens``.

        All these blocks must be resident.
        Those up to the last that is known already stay the caller's; the rest is added or refused
        as blocks are. If no block follows these, a request that goes on from their end needs the
        last ones, and they are worth keeping.

        Raises: ValueError as ``publish``
        """
        pieces = self._to_publish(namespace, tokens, payloads)
        chain = self._walk(namespace, pieces)
        if len(chain) < len(pieces):
            return self._refuse("parent")
        behind = chain[len(chain) - len(payloads) :]
        known = max((at for at, node in enumerate(behind, 1) if node.window), default=0)
        keys = [self.window_key(node.block.key) for node in behind]
        if self._collide(keys[known:]):
            return self._refuse("collision")
        ends = namespace.window_blocks if chain[-1].is_end else 0
        new = list[Node]()
        for at in range(known, len(behind)):
            parent = behind[at]
            block = _new_block((parent.block.key, keys[at]), namespace, b"", payloads[at], tenant)
            is_used = len(behind) - at <= ends
            new.append(Node(block, parent, self._rank(block) if is_used else UNUSED))
        used = windows_at_end(chain, ends)
        published = windows_of(behind)
        keep = Pinned(chain[-1], tuple({*used, *published}))
        return self._add(new, tenant, keep, Pinned(chain[-1], (*published, *new)), used=used)

    def room(self, tenant: str) -> int:
        """The most bytes that ``reserve`` may find for a tenant now."""
        mine = self._tenants.get(tenant, Account())
        own = self.limits.of(tenant) - mine.nbytes + mine.idle_bytes
        return max(0, min(own, self.limits.total_bytes - self._all.nbytes + self._all.idle_bytes))

    def reserve(self, tenant: str, nbytes: int) -> tuple[Block, ...] | None:
        """Set bytes aside for blocks that are on their way; None if they cannot be had.

        Returns: the blocks that were evicted for it
        """
        victims = self._make_room(tenant, nbytes)
        if isinstance(victims, str):
            self._refused[victims] += 1
            return None
        self._reserved[tenant] += nbytes
        self._tenants.setdefault(tenant, Account())
        for account in (self._all, self._tenants[tenant]):
            account.nbytes += nbytes
        return self._evicted(victims)

    def unreserve(self, tenant: str, nbytes: int) -> None:
        """Release reserved bytes: the blocks are published next, or never."""
        self._reserved[tenant] -= nbytes
        for account in (self._all, self._tenants[tenant]):
            account.nbytes -= nbytes
        if not self._reserved[tenant]:
            del self._reserved[tenant]
        self._close_empty(tenant)

    def evict(self, nbytes: int) -> tuple[Block, ...]:
        """Evict blocks, lowest rank first, until ``nbytes`` are free or nothing may go."""
        victims = list[Node]()
        self._evict_from(self._all, nbytes, victims)
        return self._evicted(victims)

    def limit(self, total_bytes: int) -> tuple[Block, ...]:
        """Keep no more than so many bytes from now on, or than cannot be evicted now.

        Returns: the blocks that were evicted for it
        """
        evicted = self.evict(self._all.nbytes - total_bytes)
        self.limits = replace(self.limits, total_bytes=max(total_bytes, self._all.nbytes))
        return evicted

    # -------------------------------------------------------------- reports

    def stat(self) -> IndexStats:
        """The numbers as they are."""
        return IndexStats(
            blocks=len(self._nodes) - self._windows,
            windows=self._windows,
            nbytes=self._all.nbytes - self._reserved.total(),
            reserved_bytes=self._reserved.total(),
            pinned_bytes=self._all.nbytes - self._all.idle_bytes - self._reserved.total(),
            bytes_by_tenant={name: account.nbytes for name, account in self._tenants.items()},
            reserved_by_tenant=dict(self._reserved),
            pins=len(self._pins),
            hits=self._count["hits"],
            misses=self._count["misses"],
            asked_tokens=self._count["asked_tokens"],
            hit_tokens=self._count["hit_tokens"],
            added=self._count["added"],
            evictions=self._count["evictions"],
            refused=dict(self._refused),
            collisions=self._count["collisions"],
        )

    def check(self) -> list[str]:
        """Contradictions between all tables; empty if there are none."""
        nodes = self._nodes.values()
        pins = Counter(n.block.key for pinned in self._pins.values() for n in pinned)
        children = Counter(n.parent.block.key for n in nodes if n.parent)
        everything = self._all.faults(list(nodes), self._reserved.total())
        wrong = [f"the total: {fault}" for fault in everything]
        for name in {*self._tenants, *(node.block.tenant for node in nodes)}:
            mine = [node for node in nodes if node.block.tenant == name]
            account = self._tenants.get(name, Account())
            faults = account.faults(mine, self._reserved[name])
            wrong += [f"tenant {name!r}: {fault}" for fault in faults]
            if account.nbytes > self.limits.of(name):
                wrong.append(f"tenant {name!r} is over its quota")
        if self._all.nbytes > self.limits.total_bytes:
            wrong.append("the total is over its limit")
        entries = [node.is_window for node in nodes], [n.window is not None for n in nodes]
        if {self._windows} != {sum(each) for each in entries}:
            wrong.append(f"{self._windows} window entries: blocks and entries are {entries}")
        soft_pins = Counter(node for pinned in self._soft_pins.values() for node in pinned)
        for key, node in self._nodes.items():
            if node.soft_pins != soft_pins[node]:
                wrong.append(f"block {key.hex()}: {node.soft_pins} guards: {soft_pins[node]}")
            recorded = (node.pins, node.children, node.stamp > 0)
            found = (pins[key], children[key], not pins[key] and not children[key])
            if recorded != found:
                wrong.append(
                    f"block {key.hex()}: pins, children, evictable: {recorded}, not {found}"
                )
            if node.parent and self._nodes.get(node.block.parent) is not node.parent:
                wrong.append(f"block {key.hex()} has a parent that is gone")
            if node.is_window and (node.parent is None or node.parent.window is not node):
                wrong.append(f"window entry {key.hex()} is not that of its block")
            if key != child_key(node.block.parent, node.block.tokens, self._digest):
                wrong.append(f"block {key.hex()} has the key of another")
        return wrong

    # -------------------------------------------------------------- chains

    def _walk(self, namespace: Namespace, pieces: Sequence[bytes]) -> list[Node]:
        """The longest chain of resident blocks that hold exactly these tokens."""
        chain = list[Node]()
        keys = islice(chain_keys(namespace, pieces, self._digest), 1, None)
        for key, tokens in zip(keys, pieces, strict=True):
            node = self._nodes.get(key)
            if node is None:
                break
            if not node.continues(chain[-1] if chain else None, namespace, tokens):
                self._count["collisions"] += 1
                break
            chain.append(node)
        return chain

    def _usable(self, namespace: Namespace, pieces: Sequence[bytes]) -> list[Node]:
        """The longest chain of resident blocks that a request with these tokens can use."""
        chain = self._walk(namespace, pieces)
        if namespace.window_blocks:
            has_window = [node.window is not None for node in chain]
            del chain[max(usable_lengths(has_window, namespace.window_blocks), default=0) :]
        return chain

    # -------------------------------------------------------------- changes, all checked before

    def _to_publish(
        self, namespace: Namespace, tokens: TokenIds, payloads: Sequence[Payload]
    ) -> list[bytes]:
        """The blocks of tokens to publish.

        Raises: ValueError if they are not whole blocks, or fewer than payloads
        """
        pieces = self.cut(namespace, tokens)
        is_whole = len(pieces) * self.block_tokens_of(namespace) == len(tokens)
        if not payloads or len(pieces) < len(payloads) or not is_whole:
            raise ValueError(f"{len(payloads)} blocks to publish of {len(tokens)} tokens")
        return pieces

    def _collide(self, keys: Sequence[BlockKey]) -> bool:
        """Whether one of the keys is another block's."""
        return len(set(keys)) < len(keys) or any(key in self._nodes for key in keys)

    def _add(
        self,
        new: Sequence[Node],
        tenant: str,
        keep: Pinned | None,
        result: Pinned,
        used: Sequence[Node],
    ) -> Published:
        """Add blocks, if they fit, and pin ``result``.

        ``keep``: what must not be evicted for them; ``used``: what of that the publisher used.
        """
        kept = self._pin(keep) if keep else None
        try:
            victims = self._make_room(tenant, sum(node.block.nbytes for node in new))
            if isinstance(victims, str):
                return self._refuse(victims)
            self._touch(used)
            for node in new:
                self._insert(node)
            self._count["added"] += len(new)
            blocks = tuple(node.block for node in new)
            return Published(new=blocks, pin=self._pin(result), evicted=self._evicted(victims))
        finally:
            if kept:
                self.release(kept.id)

    def _pin(self, pinned: Pinned) -> Pin:
        self._last_pin += 1
        pin = PinId(self._last_pin)
        self._pins[pin] = pinned
        for each in pinned:
            if each.pins == 0:
                self._add_idle(each, -each.block.nbytes)
            each.pins += 1
            each.stamp = 0
        return pinned.pin(pin)

    def _touch(self, pinned: Sequence[Node]) -> None:
        """Note a use. Pinned blocks are in no heap, so their rank may change."""
        for node in pinned:
            node.worth = self._rank(node.block, node.worth)

    def _rank(self, block: Block, before: float = UNUSED) -> float:
        """The worth of a block after a use; one without pages is worth nothing without others."""
        if not block.nbytes:
            return UNUSED
        known = None if before == UNUSED else before
        return self._policy.rank(known, block.seconds, block.nbytes, self._tick)

    def _insert(self, node: Node) -> None:
        """Make an idle block without children resident."""
        self._nodes[node.block.key] = node
        self._tenants.setdefault(node.block.tenant, Account())
        self._count_block(node, 1)
        if node.parent:
            node.parent.children += 1
            node.parent.stamp = 0
            if node.is_window:
                node.parent.window = node
        self._offer(node)

    def _remove(self, node: Node) -> None:
        """Undo ``_insert``."""
        del self._nodes[node.block.key]
        self._count_block(node, -1)
        node.stamp = 0
        self._close_empty(node.block.tenant)
        if node.parent:
            node.parent.children -= 1
            if node.is_window:
                node.parent.window = None
            self._offer(node.parent)

    def _close_empty(self, tenant: str) -> None:
        account = self._tenants[tenant]
        if account.nbytes == 0 and account.blocks == 0:
            del self._tenants[tenant]

    def _offer(self, node: Node) -> None:
        """Put a block among those that may be evicted, if it may be."""
        if node.pins == 0 and node.children == 0:
            self._last_stamp += 1
            node.stamp = self._last_stamp
            for account in self._accounts(node):
                account.leaves.push(node)

    def _make_room(self, tenant: str, nbytes: int) -> "list[Node] | Refusal":
        """Evict enough for ``nbytes`` more of a tenant, or nothing and return the reason."""
        mine = self._tenants.get(tenant, Account())
        over_quota = mine.nbytes + nbytes - self.limits.of(tenant)
        over_limit = self._all.nbytes + nbytes - self.limits.total_bytes
        if over_quota > mine.idle_bytes:
            return "quota"
        if over_limit > self._all.idle_bytes:
            return "memory"
        victims = list[Node]()
        if not self._evict_from(mine, over_quota, victims):
            for node in reversed(victims):
                self._insert(node)
            return "quota"
        freed = sum(node.block.nbytes for node in victims)
        self._evict_largest(over_limit - freed, {tenant: nbytes}, victims)
        return victims

    def _evict_largest(self, nbytes: int, coming: Mapping[str, int], victims: list[Node]) -> None:
        """Free bytes of the tenant that has the most at the time, again and again.

        So a tenant with less than an equal share loses nothing. ``coming``: bytes that a tenant is
        about to have. Blocks with a soft pin go last, by rank alone.
        """

        def size(name: str) -> int:
            return self._tenants[name].nbytes + coming.get(name, 0) if name in self._tenants else 0

        largest = [(-size(name), name) for name in self._tenants]
        heapify(largest)
        freed = 0
        while freed < nbytes and largest:
            negative, name = heappop(largest)
            account = self._tenants.get(name)
            leaves = account.leaves if account and -negative == size(name) else None
            node = leaves.peek() if leaves else None
            if leaves is None or node is None or node.soft_pins:
                continue  # it has another size, or nothing that may go now
            leaves.pop()
            self._remove(node)
            victims.append(node)
            freed += node.block.nbytes
            # If the parent is another tenant's block, that tenant has a leaf again.
            for owner in {name, *([node.parent.block.tenant] if node.parent else [])}:
                heappush(largest, (-size(owner), owner))
        self._evict_from(self._all, nbytes - freed, victims)

    def _evict_from(self, account: Account, nbytes: int, victims: list[Node]) -> bool:
        """Remove blocks until ``nbytes`` are free; False if too few may go."""
        freed = 0
        while freed < nbytes:
            node = account.leaves.pop()
            if node is None:
                return False
            self._remove(node)
            victims.append(node)
            freed += node.block.nbytes
        return True

    def _evicted(self, victims: Sequence[Node]) -> tuple[Block, ...]:
        self._count["evictions"] += len(victims)
        return tuple(node.block for node in victims)

    def _refuse(self, reason: Refusal) -> Published:
        self._refused[reason] += 1
        return Published(refused=reason)

    def _accounts(self, node: Node) -> tuple[Account, Account]:
        return self._all, self._tenants[node.block.tenant]

    def _count_block(self, node: Node, count: int) -> None:
        """Count a block that comes (1) or goes (-1)."""
        self._windows += count * node.is_window
        for account in self._accounts(node):
            account.blocks += count
            account.nbytes += count * node.block.nbytes
            account.idle_bytes += count * node.block.nbytes

    def _add_idle(self, node: Node, nbytes: int) -> None:
        for account in self._accounts(node):
            account.idle_bytes += nbytes


def _new_block(
    keys: Sequence[BlockKey], namespace: Namespace, tokens: bytes, payload: Payload, tenant: str
) -> Block:
    """A block with its own copy of the page ids; ``keys`` are its parent's and its own."""
    pages = payload.pages.copy()
    pages.setflags(write=False)
    parent, key = keys
    return Block(key, parent, namespace, tokens, pages, payload.nbytes, payload.seconds, tenant)
