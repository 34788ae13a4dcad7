# Ray Serve's decorators lack types.
# pyright: reportUnknownMemberType=false
"""A server whose workers compute nothing: what is left is the cost of carrying tokens.

``benchmarks/serving/streams.py`` serves ``build_app``. Router, pool, ingress and all messages are
those of a real server; only the workers are fakes. They import no torch.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.deployment import Application

from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.messages import (
    Cancel,
    Compress,
    Compressed,
    CompressionReport,
    Drained,
    Encode,
    Finished,
    Join,
    Message,
    Planned,
    Prefill,
    Prefilled,
    Register,
    RegisterAgain,
    Report,
    Request,
    Stage,
    Tokens,
)
from triptych.deployments import app
from triptych.deployments.app_plan import AppPlan, new_name
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.deployments.transport.router_link import RouterLink
from triptych.kvpool import PoolClient

REPORT_EVERY_S = 0.5
DRAIN_S = 10.0
POOL_ANSWER_S = 30.0
TOKEN, TEXT = 504, " and"


def build_app(args: dict[str, object]) -> Application:
    """The application of ``args`` with fake workers."""
    app.WorkerReplica = FakeWorkerReplica
    return app.build_app(args)


@dataclass
class Output:
    """The output of a request that decodes."""

    request: Request
    count: int
    """Tokens that were sent."""


class FakeWorkerReplica:
    """A worker of all stages that sends one word again and again.

    A request's seed is its tokens per second. All outputs of a rate get their next token at the
    same moment, as those of one decode batch do.
    """

    async def __init__(self, plan: AppPlan, stages: Sequence[Stage]) -> None:
        self._node = await asyncio.to_thread(NodeContext.enter, plan)
        plan = self._node.plan
        self._rows = plan.pages.geometry.head_rows
        self._name = new_name("worker")
        self._pool = await asyncio.to_thread(self._join_pool, plan)
        self._outputs = dict[str, Output]()
        self._writing = dict[int, asyncio.Task[None]]()
        """A task for each rate."""
        self._handles = dict[str, KVHandle]()
        self._leases = 0
        self._drained = asyncio.Event()
        address = plan.address(self._name)
        registration = Register(
            name=self._name,
            address=address,
            stages=tuple(stages),
            max_requests=plan.config.decode.max_num_seqs,
            arena=self._pool.arena.id,
        )
        self._channel = PeerChannel(address, self._receive, self._on_lost, self._node.routes)
        self._link = RouterLink(
            self._channel,
            registration,
            plan.router_address,
            on_found=self._report,
            on_lost=self._outputs.clear,
        )
        await self._channel.start()
        self._link.start()
        self._reporting = asyncio.create_task(self._keep_reporting())

    async def __del__(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), DRAIN_S)
        for task in (self._reporting, *self._writing.values()):
            task.cancel()
        self._link.stop()
        await self._channel.stop()
        await asyncio.to_thread(self._pool.close)
        self._node.run_dir.leave()

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        del sender
        for message in messages:
            match message:
                case Prefill():
                    for request in message.requests:
                        self._read(request)
                case Compress():
                    for item in message.items:
                        self._handles[item.request] = item.handle
                        self._link.post(Planned(request=item.request, pages=self._rows))
                case Encode():
                    for name in message.requests:
                        self._encode(name)
                case Join():
                    self._write(message.request)
                case Cancel():
                    for name in message.requests:
                        self._cancel(name)
                case RegisterAgain():
                    self._link.forgotten()
                case Drained():
                    self._drained.set()
                case _:
                    pass

    def _read(self, request: Request) -> None:
        handle = None
        if request.sampling.max_tokens > 1:
            self._leases += 1
            lease = LeaseRef(self._pool.arena.id, LeaseId(self._leases), 0)
            handle = KVHandle(lease, (), len(request.prompt))
        self._send(request, 0)
        self._link.post(Prefilled(request=request.id, first_token=TOKEN, handle=handle))

    def _join_pool(self, plan: AppPlan) -> PoolClient:
        directory = plan.config.pool.arena_directory
        return PoolClient(
            plan.pool_address,
            self._name,
            arena_directory=directory,
            connect_timeout_s=POOL_ANSWER_S,
        )

    def _write(self, request: Request) -> None:
        self._outputs[request.id] = Output(request, 1)
        rate = request.sampling.seed
        if rate not in self._writing:
            self._writing[rate] = asyncio.create_task(self._keep_writing(rate))

    def _encode(self, name: str) -> None:
        report = CompressionReport(policy="diffkv", raw_bytes=3, stored_bytes=1)
        handle = self._handles.pop(name)
        self._link.post(Compressed(request=name, handle=handle, report=report))

    def _cancel(self, name: str) -> None:
        self._handles.pop(name, None)
        output = self._outputs.pop(name, None)
        self._link.post(Finished(request=name, tokens=output.count if output else 0))

    def _send(self, request: Request, index: int) -> None:
        is_last = index + 1 == request.sampling.max_tokens
        tokens = Tokens(
            request=request.id,
            index=index,
            tokens=(TOKEN,),
            text=TEXT,
            finish="length" if is_last else None,
        )
        self._channel.post(request.reply_to, tokens)

    async def _keep_writing(self, rate: int) -> None:
        due = asyncio.get_running_loop().time()
        while True:
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            for name, output in list(self._outputs.items()):
                if output.request.sampling.seed != rate:
                    continue
                self._send(output.request, output.count)
                output.count += 1
                if output.count == output.request.sampling.max_tokens:
                    del self._outputs[name]
                    self._link.post(Finished(request=name, tokens=output.count))

    def _on_lost(self, address: str) -> None:
        self._link.lost(address)

    def _report(self) -> None:
        report = Report(
            name=self._name, running=len(self._outputs), waiting=0, pages_held=0, busy_s=0.0
        )
        self._link.post(report)

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._report()
