"""The stages in one process, without Ray: for tests, evaluation and notebooks.

The engines, the pool and the scheduler are those of the served application; only the transport
is missing. Messages between router and stages are packed and unpacked as on the wire.
"""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from triptych.core.config import AppConfig
from triptych.core.errors import StageLost
from triptych.core.images import Image, expand_images
from triptych.core.messages import (
    POOL,
    ROUTER,
    BorrowCacheMemory,
    Cancel,
    CompressionReport,
    Failed,
    FinishReason,
    Message,
    PromptLogprobs,
    Register,
    Request,
    Sampling,
    Send,
    Submit,
    TokenLogprob,
    Tokens,
    WantImages,
    pack,
    pixels_for,
    stages_of,
    unpack,
)
from triptych.core.pages import PagePlan
from triptych.kvpool import DiskSettings, LocalPool, PrefixSettings
from triptych.router import AttemptTable, RequestTrace, Timeouts, Windows
from triptych.router.replay import end_recording, open_scheduler
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.core_scheduler import SharedCores
from triptych.workers.decode.codebook_file import check_codebooks
from triptych.workers.decode.plugins import offers_of
from triptych.workers.device import Device
from triptych.workers.factory import (
    device_of,
    load_model,
    load_vision,
    make_engines,
    prefix_store,
)
from triptych.workers.loop import StageLoop, StepWrapper
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve
from triptych.workers.models.vision.vision_traits import describe_vision
from triptych.workers.sampling.sampler import Draw, sample

WORKER, CLIENT = "worker", "client"

Event = Tokens | Failed


def ignore(_message: Message) -> None:
    """Ignore a message."""


@dataclass
class Completion:
    """One finished output."""

    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    report: CompressionReport | None = None
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    prompt_logprobs: PromptLogprobs | None = None
    error: Failed | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.error = event
            return
        self.tokens += event.tokens
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish = event.finish or self.finish
        self.report = event.compression or self.report
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.error is not None


class LocalServer:
    """Serves requests in this process: ``with LocalServer(config) as server: ...``"""

    def __init__(
        self,
        config: AppConfig,
        model_path: Path | None = None,
        draw: Draw = sample,
        watch: Callable[[Message], None] = ignore,
        device: Device | None = None,
        make_pool: type[LocalPool] = LocalPool,
    ) -> None:
        """``watch`` is called with each message to the router, on the thread that sends it.

        ``device``: the device of all stages; None: that of decode in the settings.
        ``make_pool``: another class of pool, for ablations.
        """
        path = model_path or resolve(config.model.name)
        facts, vision = describe(path), describe_vision(path)
        check_codebooks(config, facts)
        self._images = dict[str, Sequence[Image]]()
        """By request, until it ends."""
        self._layout = vision.layout
        stages = stages_of(has_images=vision.layout is not None)
        device = device or device_of(config, stages)
        self.plan = PagePlan.of(
            config,
            facts.geometry,
            find_profile(config, facts),
            is_plain=facts.is_plain,
            learned=find_networks(config, facts),
        )
        # Raises if the plug-ins do not fit the policy or the model.
        offers_of(config.decode, self.plan.policy, can_exit=facts.is_plain)
        pages = config.pool.kv_cache_memory_bytes // self.plan.page_bytes
        prefixes = PrefixSettings.of(config.pool, self.plan)
        disk = DiskSettings.of(config.pool)
        folder = config.pool.arena_directory
        self.pool = make_pool(pages, self.plan.page_bytes, WORKER, prefixes, disk, folder)
        self._directory = TemporaryDirectory(prefix="triptych-")
        cores = SharedCores(Path(self._directory.name))
        model_context = load_model(config, self.plan, path, stages, device)
        tower = load_vision(config, path, stages, device)
        self.weight_bytes = model_context.answers.model.network.step_bytes if model_context else 0
        """Bytes of weights that a forward pass reads."""
        self.vocab_size = facts.vocab_size
        self._prefixes = prefix_store(config, self.plan, self.pool, facts.revision, device)
        engines = make_engines(
            config, self.plan, model_context, self.pool, stages, draw, self._prefixes, device, tower
        )
        grammars = model_context.answers.grammars if model_context else None
        self._loop = StageLoop(WORKER, engines, self._deliver, cores, grammars)
        self._scheduler = open_scheduler(
            config.router,
            self.plan,
            capacity_bytes=pages * self.plan.page_bytes
            - self.plan.prefix_bytes
            - config.encode.cache_bytes * (tower is not None),
            timeouts=Timeouts(report_bound_s=math.inf, silent_s=math.inf),
        )
        self._lock = threading.Lock()
        self._watch = watch
        context = config.context_tokens(facts.context_tokens)
        self._journeys = AttemptTable(Windows.of(config, context))
        self._ids = itertools.count()
        hello = Register(
            name=WORKER,
            address=WORKER,
            stages=stages,
            arena=self.pool.home,
            max_requests=config.decode.max_num_seqs,
        )
        self._to_router(hello, WORKER)
        self._to_router(self._loop.report(pages_held=0), WORKER)

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.stop()
        end_recording(self._scheduler)
        self.pool.close()
        self._directory.cleanup()

    @property
    def counters(self) -> Mapping[str, int]:
        """Number of decisions of the router, by reason."""
        with self._lock:
            return self._scheduler.snapshot(time.monotonic()).counters

    @property
    def booked_bytes(self) -> Mapping[str, int]:
        """Bytes that the router has booked for requests, by arena."""
        with self._lock:
            return self._scheduler.snapshot(time.monotonic()).booked_bytes

    def instrumented(self, wrapper: StepWrapper) -> AbstractContextManager[None]:
        """Run all work of the engines through ``wrapper`` meanwhile."""
        return self._loop.instrumented(wrapper)

    @property
    def request_traces(self) -> Sequence[RequestTrace]:
        """Traces of the latest requests, in seconds of ``time.monotonic``."""
        with self._lock:
            return self._scheduler.traces()

    @property
    def prefixes_skipped(self) -> Mapping[str, int]:
        """Prefixes that could not be published, by reason."""
        return self._prefixes.skipped if self._prefixes else {}

    def post(self, message: Message) -> None:
        """Send a message to the stages directly, without the router."""
        self._loop.post(message)

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        images: Sequence[Image] = (),
        cache_salt: str = "",
    ) -> Request:
        """A request to this server. ``prompt`` has one placeholder for each of ``images``.

        Raises: RequestError if it has not
        """
        name, spans = f"local-{next(self._ids)}", ()
        if images and self._layout is not None:
            self._images[name] = tuple(images)
            prompt, spans = expand_images(prompt, images, self._layout)
        return Request(
            id=name,
            prompt=tuple(prompt),
            sampling=sampling,
            reply_to=CLIENT,
            images=spans,
            cache_salt=cache_salt,
        )

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests together and wait for all of them."""
        done = {request.id: Completion() for request in requests}
        for event in self.stream(requests):
            done[event.request].add(event)
        return list(done.values())

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Tokens of all requests as they come; leaving early cancels the rest."""
        events, left = queue.SimpleQueue[Event](), {request.id for request in requests}
        journeys = [self._journeys.start(request, events.put) for request in requests]
        for journey in journeys:
            self._to_router(Submit(request=journey.present()), CLIENT)
        try:
            while left:
                event = self._next(events)
                if isinstance(event, Failed) or event.finish is not None:
                    left.discard(event.request)
                yield event
        finally:
            for journey in journeys:
                self._journeys.end(journey)
                self._images.pop(journey.request.id, None)
            if left:
                ids = (one.id for one in journeys if one.request.id in left)
                self._to_router(Cancel(requests=tuple(sorted(ids))), CLIENT)

    def _next(self, events: "queue.SimpleQueue[Event]") -> Event:
        """The next event; raises StageLost if the thread that would send it has died."""
        while True:
            try:
                return events.get(timeout=1.0)
            except queue.Empty:
                if not self._loop.is_alive:
                    raise StageLost(WORKER) from None
                self._tick()  # a batch of fixed size may wait for its timeout

    def _tick(self) -> None:
        with self._lock:
            sends = self._scheduler.tick(time.monotonic())
        for send in sends:
            self._route(send)

    # ---------------------------------------------------------------- delivery

    def _deliver(self, sends: Iterable[Send]) -> None:
        for send in sends:
            if send.to == ROUTER:
                self._to_router(send.message, WORKER)
            else:
                self._route(send)

    def _to_router(self, message: Message, sender: str) -> None:
        with self._lock:
            (copy,) = unpack(pack([message]))
            self._watch(copy)
            sends = self._scheduler.on(copy, sender, time.monotonic())
        for send in sends:
            self._route(send)

    def _route(self, send: Send) -> None:
        (message,) = unpack(pack([send.message]))
        if send.to == WORKER:
            self._loop.post(message)
        elif isinstance(message, WantImages):
            journey = self._journeys.get(message.request)
            held = self._images.get(journey.request.id, ()) if journey else ()
            for data in pixels_for(message, held):
                self._loop.post(data)
        elif isinstance(message, BorrowCacheMemory):
            self._to_router(self.pool.borrow_cache_memory(message.bytes), POOL)
        elif isinstance(message, Tokens) and (journey := self._journeys.get(message.request)):
            journey.hear(message)
            if journey.is_at_window_end:
                self._journeys.again(journey)
                self._to_router(Submit(request=journey.present()), CLIENT)
        elif isinstance(message, Failed) and (journey := self._journeys.get(message.request)):
            journey.fail(message)
