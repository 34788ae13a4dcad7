"""A worker's access to the prefix cache: find, pin, restore and publish blocks of prompts."""

from triptych.kvpool.disk.tier import Coming
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication, TokenIds, encode
from triptych.kvpool.prefix.cache import FoundPrefix
from triptych.kvpool.rpc import prefix_calls
from triptych.kvpool.rpc.client.registration import Registration
from triptych.kvpool.rpc.page_ranges import PageRanges


class PrefixAccess(Registration):
    """The calls of a worker to the prefix cache of its pool."""

    def find_prefix(self, namespace: Namespace, tokens: TokenIds) -> FoundPrefix | None:
        """Pin the longest cached prefix of a prompt, never all of it; None if nothing is cached.

        Its pages are read only, and stay resident until ``release_prefix``.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.FindPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).found(self.capacity_pages)

    def pin_prefix(self, namespace: Namespace, tokens: TokenIds) -> FoundPrefix | None:
        """Pin all whole blocks of these tokens; None if not all are cached.

        Its pages are read only, and stay resident until ``release_prefix``, or until the
        request ends that the pin was handed off with.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.PinPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).found(self.capacity_pages)

    @property
    def restores(self) -> bool:
        """Whether the prefix cache has a disk tier to load from."""
        return self._registered.restores

    def restore_prefix(self, namespace: Namespace, tokens: TokenIds, tenant: str) -> Coming:
        """Begin to load from disk the blocks that continue the cached prefix of a prompt.

        Call again until no block is on its way, or the caller prefers to compute. Loaded
        blocks count against the quota of ``tenant``.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.RestorePrefix(
            worker=self._id, namespace=namespace, tokens=encode(tokens), tenant=tenant
        )
        coming = self._call(asked)
        return Coming(coming.blocks, coming.seconds)

    def release_prefix(self, pin: PinId) -> None:
        """Release a pin.

        Raises: PoolError if it is not one of this worker; PoolUnavailable; NotRegistered
        """
        self._call(prefix_calls.ReleasePrefix(worker=self._id, pin=pin))

    def known_prefix(self, namespace: Namespace, tokens: TokenIds) -> int:
        """The number of blocks of these tokens that are cached, in a chain from the first.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KnowPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).blocks

    def known_windows(self, namespace: Namespace, tokens: TokenIds) -> tuple[bool, ...]:
        """Of each cached block of these tokens, whether its window entry is cached too.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KnowWindows(
            worker=self._id, namespace=namespace, tokens=encode(tokens)
        )
        return self._call(asked).are_cached

    def publish_prefix(self, new: Publication) -> int:
        """Add blocks, or window entries, to the prefix cache; returns how many were added.

        Their pages are allocated here and written. The pages of the last blocks, as many as
        were added, belong to the pool from then on, and must not be written any more; the
        caller frees the others.

        Raises: NotHeld, PoolError: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            for pages in new.blocks:
                self._page_cache.require_in_use(pages)
            asked = prefix_calls.PublishPrefix(
                worker=self._id,
                namespace=new.namespace,
                tokens=encode(new.tokens),
                blocks=tuple(map(PageRanges, new.blocks)),
                seconds=new.seconds,
                tenant=new.tenant,
                formats=tuple(new.formats),
                are_windows=new.are_windows,
            )
            added = self._ask(asked).blocks
            for pages in new.blocks[len(new.blocks) - added :]:
                self._page_cache.left(pages)
            return added

    def keep_session(
        self, namespace: Namespace, tokens: TokenIds, tenant: str, session: str
    ) -> int:
        """Evict the cached blocks of a conversation last, for its TTL; returns how many.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KeepSession(
            worker=self._id,
            namespace=namespace,
            tokens=encode(tokens),
            tenant=tenant,
            session=session,
        )
        return self._call(asked).blocks
