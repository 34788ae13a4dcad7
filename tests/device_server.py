"""A server whose workers each have a device of a fake driver, in one process, without Ray.

Pool, engines and scheduler are those of the served application; each worker has a connection of
its own to the pool, over its socket.
"""

import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.fake_driver import FakeDriver
from triptych.core.config import AppConfig
from triptych.core.messages import (
    ROUTER,
    Message,
    Register,
    Request,
    Sampling,
    Send,
    Stage,
    Submit,
    Tokens,
    pack,
    unpack,
)
from triptych.core.messages import Failed as FailedMessage
from triptych.core.pages import PagePlan
from triptych.kvpool import PoolClient, PoolServer, PrefixSettings
from triptych.kvpool.pool.device_arenas import DeviceMemory
from triptych.router import AttemptTable, Timeouts, Windows
from triptych.router.replay import open_scheduler
from triptych.workers.core_scheduler import CoreUse, DedicatedCores
from triptych.workers.decode.checkpoint import checkpoint_bytes
from triptych.workers.device import CPU, Device
from triptych.workers.factory import load_model, make_engines, prefix_store
from triptych.workers.kv.device_pages import Link
from triptych.workers.local import CLIENT, Completion
from triptych.workers.loop import StageLoop
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.stage import Engine

PATIENCE_S = 60.0


class OneAtATime(DedicatedCores):
    """Workers take turns: the fake device captures one graph at a time in a process."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(1)
        self._turn = lock

    @contextmanager
    def step(
        self,
        _is_urgent: Callable[[], bool],
        _use: CoreUse = CoreUse.TEAM,
    ) -> Generator[None]:
        with self._turn:
            yield


@dataclass
class Worker:
    name: str
    stage: Stage
    device: str
    """Name of its device; empty: it has none."""
    pool: PoolClient
    engines: list[Engine]
    loop: StageLoop

    def post(self, message: Message) -> None:
        self.loop.post(message)

    def report(self) -> Message:
        return self.loop.report(self.pool.allocated_pages)

    def close(self) -> None:
        self.loop.stop()
        self.pool.close()

    @property
    def traffic(self) -> Counter[Link]:
        """Bytes of pages that it reported, by what they crossed."""
        return sum((one._memory.traffic for one in self.engines), Counter[Link]())  # type: ignore[attr-defined]


class DeviceServer:
    """Serves with one worker for each of ``places``: a stage and the name of its device."""

    def __init__(
        self,
        settings: dict[str, object],
        model: Path,
        directory: Path,
        places: Sequence[tuple[Stage, str]],
        device: Device,
        driver: FakeDriver | None = None,
        host_bytes: int = 1,
    ) -> None:
        """``device``: what computes, of workers with a device. Without a driver pages are in host
        memory."""
        config = AppConfig.from_mapping(settings)
        self.settings, self._model, self._config = settings, model, config
        self._device, self._driver = device, driver
        facts = describe(model)
        self.plan = PagePlan.of(config, facts.geometry, find_profile(config, facts))
        self._facts, self._directory = facts, directory
        devices = tuple(dict.fromkeys(device for _, device in places if device))
        memory = DeviceMemory(driver, devices, host_bytes) if driver else None
        self.server = PoolServer(
            config.pool,
            self.plan.page_bytes,
            directory=directory,
            prefixes=PrefixSettings.of(config.pool, self.plan),
            device_memory=memory,
        )
        self.server.start()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._ids = itertools.count()
        extents = 2 * config.pool.extent_pages * self.plan.page_bytes
        kept = 0 if driver else self.plan.prefix_bytes
        self.scheduler = open_scheduler(
            config.router,
            self.plan,
            capacity_bytes=config.pool.kv_cache_memory_bytes - kept - extents,
            timeouts=Timeouts(report_bound_s=math.inf, silent_s=math.inf),
        )
        self._journeys = AttemptTable(Windows.of(config, config.context_tokens(self._context)))
        self.workers = dict[str, Worker]()
        for stage, name in places:
            self.start(stage, name)

    @property
    def _context(self) -> int:
        return self._facts.context_tokens

    def start(self, stage: Stage, place: str) -> Worker:
        """Start a worker."""
        name = f"{stage}-{place}-{next(self._ids)}"
        device = self._device if place else CPU
        size = checkpoint_bytes(self.plan, self._config.decode.max_num_seqs, self._context)
        pool = PoolClient(
            self.server.address,
            name,
            directory=self._directory,
            checkpoint_bytes=size if stage == "decode" else 0,
            device=(self._driver, place) if self._driver else None,
            keeps_copies=stage == "decode",
        )
        loaded = load_model(self._config, self.plan, self._model, [stage], device)
        prefixes = prefix_store(self._config, self.plan, pool, self._facts.revision, device)
        with self._turn:
            engines = make_engines(
                self._config, self.plan, loaded, pool, [stage], prefixes=prefixes, device=device
            )
        loop = StageLoop(
            name, engines, lambda sends: self._deliver(sends, name), OneAtATime(self._turn)
        )
        worker = self.workers[name] = Worker(name, stage, place, pool, engines, loop)
        loop.start()
        hello = Register(
            name=name,
            address=name,
            stages=(stage,),
            arena=pool.home,
            max_requests=self._config.decode.max_num_seqs if stage == "decode" else 0,
        )
        self._to_router(hello, name)
        self._to_router(worker.report(), worker.name)
        return worker

    # ---------------------------------------------------------------- requests

    def request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """A request to this server."""
        name = f"request-{next(self._ids)}"
        return Request(id=name, prompt=tuple(prompt), sampling=sampling, reply_to=CLIENT)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests together and wait for all of them."""
        events = queue.SimpleQueue[Tokens | FailedMessage]()
        done = {request.id: Completion() for request in requests}
        attempts = [self._journeys.start(request, events.put) for request in requests]
        for one in attempts:
            self._to_router(Submit(request=one.present()), CLIENT)
        until = time.monotonic() + PATIENCE_S
        while not all(one.is_done for one in done.values()):
            assert time.monotonic() < until, self.scheduler.census()
            try:
                event = events.get(timeout=0.2)
            except queue.Empty:
                self._tick()
                continue
            done[event.request].add(event)
        for one in attempts:
            self._journeys.end(one)
        return list(done.values())

    def _tick(self) -> None:
        for worker in list(self.workers.values()):
            self._to_router(worker.report(), worker.name)
        with self._lock:
            sends = self.scheduler.tick(time.monotonic())
        self._route(sends)

    # ---------------------------------------------------------------- delivery

    def _deliver(self, sends: Iterable[Send], sender: str) -> None:
        for send in sends:
            if send.to == ROUTER:
                self._to_router(send.message, sender)
            else:
                self._route([send])

    def _to_router(self, message: Message, sender: str) -> None:
        with self._lock:
            (copy,) = unpack(pack([message]))
            sends = self.scheduler.on(copy, sender, time.monotonic())
        self._route(sends)

    def _route(self, sends: Iterable[Send]) -> None:
        for send in sends:
            (message,) = unpack(pack([send.message]))
            if send.to in self.workers:
                self.workers[send.to].post(message)
            elif isinstance(message, Tokens) and (one := self._journeys.get(message.request)):
                one.hear(message)
            elif isinstance(message, FailedMessage) and (
                one := self._journeys.get(message.request)
            ):
                if message.resumable and self._journeys.again(one):
                    self._to_router(Submit(request=one.present()), CLIENT)
                else:
                    one.fail(message)

    # ---------------------------------------------------------------- reports and end

    def traffic(self) -> Mapping[Stage, Counter[Link]]:
        """Bytes of pages by stage, and by what they crossed."""
        found = dict[Stage, Counter[Link]]()
        for worker in self.workers.values():
            found[worker.stage] = found.get(worker.stage, Counter[Link]()) + worker.traffic
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()
        self.server.stop()
