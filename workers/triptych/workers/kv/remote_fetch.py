"""What comes to a worker before its engines see it: pages of other nodes are fetched first.

Engines know one arena. A message whose handle names another one waits here until its pages have
been fetched in the background, while the engines go on; then it goes to them with a handle of
their own arena, as if the pages had been here all the time.
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
from triptych.kvpool.rpc import page_ranges
from triptych.workers.stage import refuse

logger = logging.getLogger(__name__)

FETCHES = 2
"""Requests whose pages are fetched at once: more would share the same line."""


class RemoteFetch:
    """Passes messages on to the engines, those of other nodes once their pages are here."""

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
        self._under_way = dict[str, bool]()
        """Requests that are being fetched; whether they were cancelled."""

    def take(self, message: Message) -> None:
        """Pass a message on, now or when its pages are here."""
        match message:
            case Join() if self._is_far(message.handle):
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
        """Give up whatever is being fetched."""
        with self._lock:
            self._under_way = dict.fromkeys(self._under_way, True)

    def close(self) -> None:
        """Give up whatever is being fetched, and wait until nothing of it is held."""
        self.cancel_all()
        self._fetcher.close()
        self._threads.shutdown()

    def completed(self, report: Report) -> Report:
        """The report with what went wrong on the way of pages."""
        traffic = self._fetcher.traffic
        return replace(report, transfers_resumed=traffic.resumed, chunks_refused=traffic.bad_chunks)

    # ---------------------------------------------------------------- taking

    def _take_compress(self, message: Compress) -> None:
        near = tuple(item for item in message.items if not self._is_far(item.handle))
        if near:
            self._post(Compress(items=near))
        for item in message.items:
            if self._is_far(item.handle):
                owner = item.prefix.tenant if item.prefix else ""
                self._begin(item.request, item.handle, "prefill", _compress_of(item), owner)

    def _is_far(self, handle: KVHandle) -> bool:
        return handle.lease_ref.arena != self._pool.arena.id

    def _mark(self, requests: Sequence[str]) -> tuple[str, ...]:
        """Cancel what is being fetched; returns the others."""
        with self._lock:
            mine = [name for name in requests if name in self._under_way]
            self._under_way.update(dict.fromkeys(mine, True))
            return tuple(name for name in requests if name not in self._under_way)

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
            self._under_way[request] = False
        self._threads.submit(self._fetch, request, handle, source_worker, here, tenant)

    def _fetch(
        self,
        request: str,
        handle: KVHandle,
        source_worker: Stage,
        here: Callable[[KVHandle], Message],
        tenant: str,
    ) -> None:
        """Fetch the pages of one request, and say what became of it. Runs in a thread."""
        try:
            message = here(self._bring(request, handle, tenant))
        except Cancelled:
            message = None
        except TriptychError as error:
            self._end(request, _what_ended_it(request, error, source_worker))
            return
        except Exception:
            logger.exception("the pages of request %s did not come over", request)
            self._end(request, TriptychError("internal error"))
            return
        with self._lock:
            is_cancelled = self._under_way.pop(request)
        if message is None or is_cancelled:
            self._post(Cancel(requests=(request,)))  # it frees what was fetched, and says so
            return
        self._post(message)
        self._deliver([Send(ROUTER, Fetched(request=request))])

    def _end(self, request: str, error: TriptychError) -> None:
        with self._lock:
            is_cancelled = self._under_way.pop(request)
        if is_cancelled:
            self._post(Cancel(requests=(request,)))
        else:
            self._deliver([refuse(request, error)])

    def _bring(self, request: str, handle: KVHandle, tenant: str) -> KVHandle:
        """The same pages in this node's arena."""
        parts = [page_ranges.unpack(run.pages, self._pool.capacity_pages) for run in handle.runs]
        ids = np.concatenate(parts)
        formats = zip((run.format for run in handle.runs), map(len, parts), strict=True)
        about = About(tenant, tuple(formats))
        lease_ref, mine = self._fetcher.fetch(
            request, handle.lease_ref, ids, lambda: self._gone(request), about
        )
        ends = np.cumsum([part.size for part in parts])[:-1]
        moved = tuple(
            replace(run, pages=page_ranges.pack(pages))
            for run, pages in zip(handle.runs, np.split(mine, ends), strict=True)
        )
        return replace(handle, lease_ref=lease_ref, runs=moved)

    def _gone(self, request: str) -> bool:
        with self._lock:
            return self._under_way[request]


def _join_of(message: Join) -> Callable[[KVHandle], Message]:
    return lambda handle: replace(message, handle=handle)


def _compress_of(item: CompressItem) -> Callable[[KVHandle], Message]:
    return lambda handle: Compress(items=(replace(item, handle=handle),))


def _what_ended_it(request: str, error: TriptychError, source_worker: Stage) -> TriptychError:
    """What the client is to hear. Whoever gave the pages away may be gone, and so are they."""
    logger.warning("the pages of request %s did not come over: %s", request, error)
    is_here = isinstance(error, PoolExhausted)
    return error if is_here else StageLost(source_worker)
