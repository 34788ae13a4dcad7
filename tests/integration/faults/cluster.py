"""The server's processes without Ray: the same shells, sockets and shared memory.

Starting a process takes a tenth of a second, since it is forked from one that has imported
everything. So thousands of deaths can be tried where Ray allows for dozens.
"""

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, cast

import numpy as np
import pytest
import torch

from tests.fake_driver import FakeDriver
from tests.integration.faults.points import (
    EXIT_CODE,
    LAST_ACTS,
    LAST_GIVEN_UP,
    POINTS,
    TAKEOVER,
    Board,
    watch_points,
)
from tests.learned import networks_beside
from tests.tiny import DIFFKV
from triptych.cli.pool import pool_at
from triptych.core.config import AppConfig
from triptych.core.errors import PoolError
from triptych.core.handles import LeaseId
from triptych.core.images import Image
from triptych.core.messages import ROUTER, Failed, Preempt, Request, Send
from triptych.deployments.app import make_plan
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.replicas import router, worker
from triptych.deployments.replicas.router import RouterReplica
from triptych.deployments.replicas.router_client import RouterClient
from triptych.deployments.replicas.worker import WorkerReplica
from triptych.deployments.transport import run_dir
from triptych.kvpool import DeviceArenas, DeviceMemory, PoolServer, PoolStats, PrefixSettings
from triptych.kvpool.rpc import local_pool
from triptych.kvpool.rpc.calls import CheckPool, StatPool
from triptych.kvpool.rpc.local_pool import PoolCall
from triptych.kvpool.rpc.page_cache import _TAKEN
from triptych.router import RequestAttempts, Scheduler
from triptych.router.passes.migration import can_move
from triptych.router.state.request_table import State
from triptych.workers.device import CPU
from triptych.workers.encode.encode_engine import EncodeEngine

ROLES = ("pool", "router", "prefill", "compress", "decode", "decode")
WITH_IMAGES = (*ROLES, "encode")
WATCHED = {"prefill": ("prefill",), "compress": ("compress",), "decode": ("decode", TAKEOVER)}
DEVICES = {"prefill": "gpu-0", "compress": "gpu-0", "decode": "gpu-1", "encode": "gpu-0"}
"""Where the workers of each role compute if pages are on devices."""
LINGER_S = 0.2
"""How long devices go on with the work of a dead worker."""
LATE_WRITES, LATE_BYTE = 16, 0xFF
"""Most writes that a worker leaves to its device when it dies, and what they write: NaN."""
ABSENT = -1
LOOK_EVERY_S = 0.02
PATIENCE_S = 60.0
LONGEST_LOOK_S = 6.0
"""One look asks a pool, which may take its time-out."""
STACKS = signal.SIGUSR1
"""Has a process print the stacks of its threads to stderr."""

MOVES_A_FRAME = 0.3
"""Requests that are moved with each frame that reaches the router."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


@dataclass
class Answer:
    """What a client got."""

    tokens: list[int]
    ending: str
    shared_bytes: int = 0
    """Of pages that it read where the cache has them."""
    rated: list[int] = field(default_factory=list[int])
    """Tokens that came with a log probability."""
    retries: int = 0
    """Attempts after the first, each of which computes the prompt anew."""


class Cluster:
    """Starts all processes, and starts anew whoever dies. Clients ask from this process."""

    def __init__(
        self,
        model: Path,
        *,
        shards: int = 1,
        in_parts: bool = False,
        is_lowering: bool = False,
        on_devices: bool = False,
        are_apart: bool = False,
        revokes: bool = True,
        methods: Sequence[str] = (),
        compressor: Mapping[str, str] = MappingProxyType({}),
        **pool: Any,
    ) -> None:
        """``in_parts``: no prefixes are kept, and prompts are encoded layer by layer.
        ``is_lowering``: nearly all tokens are high, and running requests are lowered at random.

        ``on_devices``: pages are in arenas of devices of a fake driver, and workers compute on
        these devices. A worker that dies at a point has writes queued there, which come as late as
        a device may do them. ``are_apart``: these devices do not access each other. ``revokes``: as
        of ``FakeDriver``. A model that reads images has an
        encode worker too. ``compressor`` and ``pool``: further settings of these.
        """
        on_devices = on_devices or are_apart
        each = {"num_replicas": shards, "num_gpus": int(on_devices)}
        self._is_lowering, self._on_devices, self._revokes = is_lowering, on_devices, revokes
        self._are_apart = are_apart
        self.shares_prefixes = not in_parts and not on_devices
        """Whether requests read pages of the prefix cache; those on devices have copies."""
        arena = {"arena": "device"} if on_devices else {}
        classes = {"alpha_high": 0.05} if is_lowering else {}
        parts = {"max_num_batched_tokens": 32} if in_parts else {}
        settings: dict[str, Any] = {
            "model": {"name": str(model), "dtype": "float32", "max_model_len": 256},
            # Some answers drop tokens, others can be kept.
            "compressor": {
                "actor": each,
                "profile": "none",
                **DIFFKV,
                "alpha_low": 0.002,
                "methods": list(methods),
                "learned": networks_beside(model),
                **classes,
                **compressor,
            },
            "encode": {"actor": {"threads": 1, **each}, "cache_bytes": 1 << 18},
            "prefill": {"actor": {"threads": 1, **each}, **parts},
            "decode": {
                "actor": {"threads": 1, **each, "num_replicas": 2 * shards},
                "max_num_seqs": 4,
            },
            "pool": {
                "kv_cache_memory_bytes": shards * 16 << 20,
                "prefix_bytes": 0 if in_parts else shards * 2 << 20,
                "extent_pages": 4,
                **arena,
                **pool,
            },
            "router": {"shards": shards},
            "experimental": {"layers_at_once": 1} if in_parts else {},
        }
        config = AppConfig.from_mapping(settings)
        self.plan = make_plan(config)
        self._plans = [self.plan.of_shard(config, shard) for shard in range(shards)]
        roles = WITH_IMAGES if self.plan.vision.layout else ROLES
        self._roles = [(role, shard) for shard in range(shards) for role in roles]
        size = len(POINTS)
        self.board = Board(RawArray("i", size), RawArray("i", size))
        self.deaths = Counter[str]()
        self.longest_pause_s = 0.0
        """How much later than it should this process went on; whoever asks sets it to 0."""
        self._taken = RawArray("i", [ABSENT] * len(self._roles))
        self._processes = dict[int, BaseProcess]()
        self._ids = itertools.count()
        # Nobody asks for the status, so there need be no handle to ask through.
        self.engine = RouterClient(self.plan)
        self._attempts = Counter[str]()
        self._count_attempts()
        self._watching: asyncio.Task[None] | None = None
        self._driver: FakeDriver | None = None

    async def __aenter__(self) -> Self:
        for index in range(len(self._roles)):
            self._start(index)
        await self.engine.start()
        self._watching = asyncio.create_task(self._watch())
        await self.until(self._is_whole, "all processes are there")
        arenas = len(self.ledger().arenas)
        assert arenas == (1 + len({*DEVICES.values()}) if self._on_devices else 1)
        self._driver = FakeDriver(self.plan.run_dir) if self._on_devices else None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers, look whether anything is held, then stop the rest."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            await asyncio.to_thread(self._stop, *DEVICES)
            if kind is None:
                faults = await asyncio.to_thread(self._faults, only_prefixes=True)
                assert faults == [], faults
        finally:
            await self.engine.stop()
            await asyncio.to_thread(self._stop, "router", "pool")
            run_dir.remove_orphans()

    async def answer(
        self,
        request: Request,
        salt: str = "",
        session: str = "",
        images: Sequence[Image] = (),
    ) -> Answer:
        """One client's request, from submission to its end.

        It shares its prefix with those of the same salt, and with nobody if there is none. Without
        a ``session`` it is a conversation of its own.
        """
        name = f"r{next(self._ids)}"
        asked = Request(
            id=name,
            prompt=request.prompt,
            sampling=request.sampling,
            reply_to=self.engine.address,
            cache_salt=salt or name,  # each prompt is computed, and kept
            session=session or name,  # and its answer is kept as well
            method=request.method,
            images=request.images,
        )
        answer = Answer([], f"no end within {PATIENCE_S:.0f} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                async for event in self.engine.generate([asked], images):
                    if isinstance(event, Failed):
                        answer.ending = f"{event.code}: {event.message}"
                    else:
                        answer.tokens += event.tokens
                        answer.rated += [one.token for one in event.logprobs]
                        answer.ending = event.finish or answer.ending
                        if event.compression:
                            answer.shared_bytes = event.compression.shared_bytes
        answer.retries = self._attempts.pop(name, 0)
        return answer

    def _count_attempts(self) -> None:
        begin_again = self.engine.attempts.again

        def again(attempts: RequestAttempts) -> bool:
            self._attempts[attempts.id.partition("~")[0]] += 1
            return begin_again(attempts)

        self.engine.attempts.again = again

    async def settled(self) -> None:
        """Wait until nobody holds anything; raises TimeoutError that says who does."""
        await self.until(self._is_whole, "all processes are back")
        await self.until(lambda: not any(self._taken), "workers hold no page")
        await self.until(lambda: self._faults() == [], "the books are even")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something; raises TimeoutError that says for what.

        Then all processes print the stacks of their threads. Time in which this process stood still
        does not count: so did the others, as a rule.
        """
        waited_s, looked = 0.0, time.monotonic()
        while not await asyncio.to_thread(holds):
            waited_s += min(time.monotonic() - looked, LONGEST_LOOK_S)
            looked = time.monotonic()
            if waited_s > PATIENCE_S:
                now = (list(self._taken), await asyncio.to_thread(self._faults))
                self._print_stacks()
                raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}; now {now}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _print_stacks(self) -> None:
        for process in self._processes.values():
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, STACKS)

    # ---------------------------------------------------------------- processes

    def _start(self, index: int) -> None:
        self._taken[index] = ABSENT
        role, shard = self._roles[index]
        modes = {
            "is_lowering": self._is_lowering,
            "revokes": self._revokes,
            "are_apart": self._are_apart,
        }
        args = (role, self._plans[shard], self.board, self._taken, index, modes)
        process = FORKS.Process(target=run, args=args, daemon=True)
        process.start()
        self._processes[index] = process

    async def _watch(self) -> None:
        """What Serve does: whoever died is started anew."""
        while True:
            slept = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)
            pause_s = time.monotonic() - slept - LOOK_EVERY_S
            self.longest_pause_s = max(self.longest_pause_s, pause_s)
            for index, process in self._processes.items():
                if process.exitcode is not None:
                    role, _ = self._roles[index]
                    self.deaths[role + self._reason(process)] += 1
                    self._start(index)

    def _reason(self, process: BaseProcess) -> str:
        """Why a process ended that was not told to; empty if it was."""
        if process.exitcode == EXIT_CODE:
            return ""
        with contextlib.suppress(FileNotFoundError):
            logged = [line.split("|") for line in log_of(self.plan).read_text().splitlines()]
            for pid, name, why in reversed(logged):
                if pid == str(process.pid):
                    lost = [said for by, of, said in logged if by == ROUTER and of == name]
                    return ", ended by the pool: " + ", ".join([why, *lost[:1]])
        return f", exit code {process.exitcode}"

    def _stop(self, *roles: str) -> None:
        chosen = [self._processes[i] for i, (role, _) in enumerate(self._roles) if role in roles]
        for process in chosen:
            process.terminate()
        for process in chosen:
            process.join(20)
            if process.exitcode is None:
                process.kill()

    def _is_whole(self) -> bool:
        return ABSENT not in self._taken

    def ledger(self) -> PoolStats:
        """The pool's books; raises PoolUnavailable while there is none."""
        with pool_at(self.plan.pool_address) as pool:
            return pool.call(StatPool())

    @property
    def late_writes(self) -> dict[str, int]:
        """Queued writes of dead workers that were refused, and those that came to pages of others.

        Of a cluster with pages on devices.
        """
        assert self._driver is not None
        return {"refused": self._driver.refused, "done": self._driver.done}

    def kill(self, role: str, shard: int = 0) -> None:
        """End the first process of a role in a shard without a word."""
        self._processes[self._roles.index((role, shard))].kill()

    def freeze(self, role: str, shard: int = 0) -> None:
        """Stop the first process of a role in a shard, as a machine without a core for it does."""
        pid = self._processes[self._roles.index((role, shard))].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def _faults(self, *, only_prefixes: bool = False) -> list[str]:
        """What is wrong in the books of all pools while nothing runs."""
        plans = self._plans
        return [wrong for plan in plans for wrong in self._faults_in(plan, only_prefixes)]

    def _faults_in(self, plan: AppPlan, only_prefixes: bool) -> list[str]:
        try:
            with pool_at(plan.pool_address) as pool:
                wrong, ledger = list(pool.call(CheckPool()).faults), pool.call(StatPool())
        except PoolError as error:
            return [str(error)]
        if ledger.request_pages != ledger.prefix_pages:
            wrong.append(f"requests hold pages: {ledger.by_request}")
        if self._driver and self._revokes and self._driver.done:
            wrong.append(f"{self._driver.done} late writes of dead workers came to pages of others")
        if only_prefixes and ledger.extent_pages:
            wrong.append(f"workers that left hold {ledger.extent_pages} pages")
        return wrong


# ---------------------------------------------------------------- in the processes


def run(
    role: str, plan: AppPlan, board: Board, taken: Any, index: int, modes: dict[str, bool]
) -> None:
    """Be one of the server's processes."""
    faulthandler.register(STACKS)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what is said of deaths is no news here
    for watched in WATCHED.get(role, (role,)):
        watch_points(watched, board)
    if role == "pool":
        be_pool(plan, taken, index, modes)
    else:
        asyncio.run(
            be_router(plan, taken, index, is_lowering=modes["is_lowering"])
            if role == "router"
            else be_worker(role, plan, taken, index, cut_of(modes))
        )


def cut_of(modes: Mapping[str, bool]) -> list[tuple[str, str]]:
    """Pairs of devices that do not access each other."""
    names = sorted({*DEVICES.values()})
    return list(itertools.combinations(names, 2)) if modes["are_apart"] else []


class Reasons(logging.Handler):
    """Writes which workers count as lost, and which processes are ended, to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        said = record.args if isinstance(record.args, tuple) else ()
        by = () if record.msg == local_pool.PROCESS_ENDED else (ROUTER,)
        if record.msg in (local_pool.PROCESS_ENDED, router.WORKER_LOST):
            with self._path.open("a") as file:
                file.write("|".join(map(str, (*by, *said))) + "\n")


def log_of(plan: AppPlan) -> Path:
    """Where pools and routers write whom they end or lose, and why; it outlives them."""
    return plan.run_dir / "reasons"


def log_reasons(plan: AppPlan) -> None:
    """Have this process log whom it ends or loses, and nothing else."""
    logging.disable(logging.NOTSET)
    logging.getLogger().addHandler(logging.NullHandler())
    for module in (local_pool, router):
        module.logger.addHandler(Reasons(log_of(plan)))


def be_pool(plan: AppPlan, taken: Any, index: int, modes: Mapping[str, bool]) -> None:
    run_dir.remove_orphans()
    place = run_dir.RunDir.enter(plan.run_dir)
    log_reasons(plan)
    prefixes = PrefixSettings.of(plan.config.pool, plan.pages)
    memory = None
    if plan.config.pool.arena == "device":
        driver = FakeDriver(
            plan.run_dir, cut_of(modes), revokes=modes["revokes"], linger_s=LINGER_S
        )
        devices = tuple(dict.fromkeys(DEVICES.values()))
        memory = DeviceMemory(driver, devices, plan.host_arena_bytes)
    server = PoolServer(
        plan.config.pool,
        plan.pages.page_bytes,
        address=plan.pool_address,
        prefixes=prefixes,
        device_memory=memory,
    )
    if memory:
        write_late(server, plan.run_dir)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server.start()
    taken[index] = 0
    stop.wait()
    server.stop()
    place.leave()


def write_late(server: PoolServer, folder: Path) -> None:
    """Do what dead workers have queued once its pages have another owner, after each call."""
    owned, pool = server._memory, server._pool
    assert owned is not None
    driver, shape = owned.driver, owned.arenas.shape
    assert isinstance(driver, FakeDriver)
    all_access = FakeDriver(folder)
    mapped = dict[int, DeviceArenas]()
    """All arenas that there were, by their number: those of devices come with their workers."""

    def everywhere() -> DeviceArenas:
        there = dict(owned._descriptors)
        if len(there) not in mapped:
            mapped[len(there)] = DeviceArenas(
                owned.arenas.id, shape, all_access, there, shape.devices[0]
            )
        return mapped[len(there)]

    call, leases = pool.call, pool.page_pool._leases

    def is_elsewhere(pid: int, page: int) -> bool:
        lease = leases.by_id.get(LeaseId(int(leases.owner[page])))
        return lease is not None and lease.worker.process.pid != pid

    def call_and_write(asked: PoolCall[Any]) -> Any:
        try:
            return call(asked)
        finally:
            with pool.lock:
                driver.run_queue(everywhere(), is_elsewhere)

    pool.call = call_and_write


def move_at_random() -> None:
    """Have running requests moved all the time; to be even, some would move now and then."""
    luck, schedule = random.Random(0), Scheduler.schedule

    def restless(self: Scheduler, now: float, *, is_tick: bool = False) -> list[Send]:
        cluster = self._cluster
        still = [
            entry
            for entry in cluster.requests.in_state(State.DECODING)
            if can_move(entry) and not entry.is_preempt_sent
        ]
        if still and luck.random() < MOVES_A_FRAME:
            entry = luck.choice(still)
            entry.is_preempt_sent = True
            cluster.outbox.post(entry.worker, Preempt(requests=(entry.id,)))
        return schedule(self, now, is_tick=is_tick)

    Scheduler.schedule = restless


def lower_at_random() -> None:
    """Have running requests lowered all the time; while memory is short, some would be."""
    luck, schedule = random.Random(1), Scheduler.schedule

    def lowering(self: Scheduler, now: float, *, is_tick: bool = False) -> list[Send]:
        memory, requests = self._growth.lowering, self._cluster.requests
        able = [
            entry
            for entry in requests.in_state(State.DECODING)
            if memory._may_lower(entry, entry.placement.final_arena)
        ]
        if able and luck.random() < MOVES_A_FRAME:
            memory._lower(luck.choice(able), memory.bookings.row_bytes)
        return schedule(self, now, is_tick=is_tick)

    Scheduler.schedule = lowering


async def be_router(plan: AppPlan, taken: Any, index: int, *, is_lowering: bool) -> None:
    stop = told_to_stop()
    move_at_random()
    if is_lowering:
        lower_at_random()
    log_reasons(plan)
    shell = RouterReplica.__new__(RouterReplica)
    await shell.__init__(plan)
    taken[index] = 0
    await stop.wait()


class Worker(WorkerReplica):
    """A worker that lets others see how many pages it has in use, beside its cache of features."""

    @property
    def pages_in_use(self) -> int:
        if self._pool.is_lost:
            return ABSENT
        engines = self._loop._engines
        cached = sum(one.cache._used for one in engines if isinstance(one, EncodeEngine))
        return self._pool.allocated_pages - cached

    def queue_writes(self) -> None:
        """Leave writes to pages of this worker's requests to its device."""
        arenas, cache = self._pool.arena, self._pool._page_cache
        if self._pool.is_lost:
            return
        assert isinstance(arenas, DeviceArenas)
        assert isinstance(arenas.driver, FakeDriver)
        given_up = LAST_GIVEN_UP[0]
        attached = [it for it in cache._attached.items() if it[0] not in given_up.leases]
        held = [ids[cache._where[ids] == lease] for lease, ids in attached]
        held = np.concatenate([np.flatnonzero(cache._where == _TAKEN), *held])
        held = held[~np.isin(held, given_up.pages)]
        if not arenas.stores_at_host:
            held = held[arenas.arenas_of(held) > 0]
        for page in held[:LATE_WRITES].tolist():
            arenas.driver.queue_write(arenas, page, LATE_BYTE)


def use_device(plan: AppPlan, name: str, cut: Sequence[tuple[str, str]]) -> None:
    """Compute on a device of the fake driver, with the kernels of the CPU.

    A vision tower computes on the host, where its features are.
    """
    from tests.far import quick_device  # noqa: PLC0415 - adds a device to torch

    driver, device = FakeDriver(plan.run_dir, cut), quick_device(pytest.MonkeyPatch())
    worker._own_gpu = lambda _plan: (driver, name)
    worker.device_of = lambda _config, stages: CPU if "encode" in stages else device


async def be_worker(
    role: str, plan: AppPlan, taken: Any, index: int, cut: Sequence[tuple[str, str]]
) -> None:
    stop = told_to_stop()
    if plan.config.pool.arena == "device":
        use_device(plan, DEVICES[role], cut)
    shell = Worker.__new__(Worker)
    await shell.__init__(plan, [cast(Any, role)])
    if plan.config.pool.arena == "device":
        LAST_ACTS.append(shell.queue_writes)
    while not stop.is_set():
        taken[index] = shell.pages_in_use
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_EVERY_S)
    await shell.__del__()


def told_to_stop() -> asyncio.Event:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop
