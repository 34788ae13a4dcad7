"""Fetches the pages of other nodes before the engines get a message that needs them.

Engines use the arenas of one pool. A message whose handle names an arena of another pool waits
until its pages are fetched in the background; the engines work meanwhile. Then the engines get the
message with a handle of their own arena.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from triptych.core.errors import (
    Cancelled,
    PoolExhausted,
    StageLost,
    TriptychError,
)
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    ROUTER,
    Cancel,
    Compress,
    CompressItem,
    Fetched,
    Join,
    Message,
    Report,
    Send,
    Stage,
)
from triptych.kvpool import About, Fetcher, WorkerPool
from triptych.workers.kv.handle_codec import copied_handle, pages_by_run
from triptych.workers.stage import refuse

logger = logging.getLogger(__name__)

FETCHES = 2
"""Requests whose pages are fetched concurrently: more would share the same network link."""


class RemoteFetch:
    """Passes messages to the engines, those with remote pages after these are fetched."""

    def __init__(
        self,
        pool: WorkerPool,
        fetcher: Fetcher,
        post: Callable[[Message], None],
        deliver: Callable[[Sequence[Send]], None],
    ) -> None:
        """``post`` and ``deliver`` are called from any thread."""
        self._pool, self._fetcher, self._post, self._deliver = pool, fetcher, post, deliver
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._lock = threading.Lock()
        self._fetching = dict[str, bool]()
        """Requests that are being fetched, and whether they were cancelled."""

    def take(self, message: Message) -> None:
        """Pass a message to the engines, now or when its pages are fetched."""
        match message:
            case Join() if self._is_remote(message.handle):
                owner, here = message.request.tenant, _join_of(message)
                self._begin(message.request.id, message.handle, "compress", here, owner)
            case Compress():
                self._take_compress(message)
            case Cancel():
                left = self._mark(message.requests)
                if left or not message.requests:
                    self._post(Cancel(requests=left))
            case _:
                self._post(message)

    def cancel_all(self) -> None:
        """Cancel all fetches."""
        with self._lock:
            self._fetching = dict.fromkeys(self._fetching, True)

    def close(self) -> None:
        """Cancel all fetches and wait until their pages are free."""
        self.cancel_all()
        self._fetcher.close()
        self._threads.shutdown()

    def completed(self, report: Report) -> Report:
        """Add the errors of transfers, and their speed, to a report."""
        traffic = self._fetcher.traffic
        return replace(
            report,
            transfers_resumed=traffic.resumed,
            chunks_refused=traffic.bad_chunks,
            link_bytes_s=self._fetcher.link.bytes_s,
        )

    # ---------------------------------------------------------------- taking

    def _take_compress(self, message: Compress) -> None:
        near = tuple(item for item in message.items if not self._is_remote(item.handle))
        if near:
            self._post(Compress(items=near))
        for item in message.items:
            if self._is_remote(item.handle):
                owner = item.prefix.tenant if item.prefix else ""
                self._begin(item.request, item.handle, "prefill", _compress_of(item), owner)

    def _is_remote(self, handle: KVHandle) -> bool:
        return not self._pool.has(handle.lease_ref.arena)

    def _mark(self, requests: Sequence[str]) -> tuple[str, ...]:
        """Mark fetches of these requests as cancelled; returns the requests without a fetch."""
        with self._lock:
            mine = [name for name in requests if name in self._fetching]
            self._fetching.update(dict.fromkeys(mine, True))
            return tuple(name for name in requests if name not in self._fetching)

    # ---------------------------------------------------------------- fetching

    def _begin(
        self,
        request: str,
        handle: KVHandle,
        source_worker: Stage,
        here: Callable[[KVHandle], Message],
        tenant: str,
    ) -> None:
        with self._lock:
            self._fetching[request] = False
        self._threads.submit(self._fetch, request, handle, source_worker, here, tenant)

    def _fetch(
        self,
        request: str,
        handle: KVHandle,
        source_worker: Stage,
        here: Callable[[KVHandle], Message],
        tenant: str,
    ) -> None:
        """Fetch the pages of one request and report the result. Runs in a thread."""
        try:
            message = here(self._fetch_pages(request, handle, tenant))
        except Cancelled:
            message = None
        except TriptychError as error:
            self._end(request, _fetch_error(request, error, source_worker))
            return
        except Exception:
            logger.exception("the fetch of the pages of request %s failed", request)
            self._end(request, TriptychError("internal error"))
            return
        with self._lock:
            is_cancelled = self._fetching.pop(request)
        if message is None or is_cancelled:
            self._post(Cancel(requests=(request,)))  # the engines free the pages and acknowledge
            return
        self._post(message)
        self._deliver([Send(ROUTER, Fetched(request=request))])

    def _end(self, request: str, error: TriptychError) -> None:
        with self._lock:
            is_cancelled = self._fetching.pop(request)
        if is_cancelled:
            self._post(Cancel(requests=(request,)))
        else:
            self._deliver([refuse(request, error)])

    def _fetch_pages(self, request: str, handle: KVHandle, tenant: str) -> KVHandle:
        """Copy the pages of a handle to this node's arena; the new handle."""
        parts = pages_by_run(handle, self._pool.capacity_pages)
        formats = zip((run.format for run in handle.runs), map(len, parts), strict=True)
        about = About(tenant, tuple(formats))
        lease_ref, mine = self._fetcher.fetch(
            request,
            handle.lease_ref,
            np.concatenate(parts),
            lambda: self._is_cancelled(request),
            about,
        )
        return copied_handle(handle, self._pool.capacity_pages, lease_ref, mine)

    def _is_cancelled(self, request: str) -> bool:
        with self._lock:
            return self._fetching[request]


def _join_of(message: Join) -> Callable[[KVHandle], Message]:
    return lambda handle: replace(message, handle=handle)


def _compress_of(item: CompressItem) -> Callable[[KVHandle], Message]:
    return lambda handle: Compress(items=(replace(item, handle=handle),))


def _fetch_error(request: str, error: TriptychError, source_worker: Stage) -> TriptychError:
    """The error of the request: its own if the pool is full here, else the source stage is lost."""
    logger.warning("the fetch of the pages of request %s failed: %s", request, error)
    is_here = isinstance(error, PoolExhausted)
    return error if is_here else StageLost(source_worker)
