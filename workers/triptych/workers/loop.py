"""The one thread in which a worker computes: takes messages, steps its engines, sends results."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

from triptych.core.errors import PoolError, TriptychError
from triptych.core.messages import (
    ROUTER,
    Cancel,
    Compress,
    Encode,
    Expect,
    Finished,
    Join,
    Layers,
    LayersEncoded,
    Message,
    Preempt,
    Prefill,
    Report,
    Resume,
    Send,
    Stage,
)
from triptych.workers.core_scheduler import Cores
from triptych.workers.stage import Engine, refuse

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Send]], None]
"""Takes what a step has to say; called in the loop's thread, must not block."""


Work = Callable[[], Iterable[Send] | None]
StepWrapper = Callable[[Engine, Work], Iterable[Send] | None]
"""Does a piece of work of an engine, and may look on."""

MEASURED_STEPS = 512
"""Steps whose times say how long one may take."""

CANCEL_ALL = Cancel(requests=())
"""Stands for every request that the worker holds."""


def requests_of(message: Message) -> list[str]:
    """Ids of the requests that a message from the router asks a stage to work on."""
    match message:
        case Prefill(requests=requests):
            return [request.id for request in requests]
        case Compress(items=items):
            return [item.request for item in items]
        case Encode(requests=names) | Preempt(requests=names) | Expect(requests=names):
            return list(names)
        case Layers(request=name) | LayersEncoded(request=name):
            return [name]
        case Join(request=request) | Resume(join=Join(request=request)):
            return [request.id]
        case _:
            return []


class StageLoop:
    """Runs the engines of one worker process, in turn, while any of them has work.

    With nothing to do the thread sleeps on its inbox, so an idle worker uses no core.
    """

    def __init__(
        self, name: str, engines: Sequence[Engine], deliver: Deliver, cores: Cores
    ) -> None:
        self.name, self._engines, self._deliver, self._cores = name, engines, deliver, cores
        self._inbox = queue.SimpleQueue[Message | None]()
        self._pending = deque[Message | None]()
        """What was taken from the inbox, and not looked at yet."""
        self._is_over = False
        stages = [engine.stage for engine in engines]
        self._is_prefill_only, self._is_decode_only = stages == ["prefill"], stages == ["decode"]
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._busy_s = 0.0
        self._steps_s = deque[float](maxlen=MEASURED_STEPS)
        self._step_since: float | None = None
        self._running = 0
        self._waits_since = dict[Stage, float]()
        """Since when those stages have waited for a turn."""
        self._around: StepWrapper = _run_unwrapped

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Message) -> None:
        """Hand the loop a message; any thread."""
        self._inbox.put(message)

    @contextmanager
    def instrumented(self, around: StepWrapper) -> Generator[None]:
        """Have ``around`` do whatever is begun meanwhile; any thread."""
        self._around = around
        try:
            yield
        finally:
            self._around = _run_unwrapped

    def cancel_all(self) -> None:
        """Drop every request that is here when the message is taken, and all pages; any thread."""
        self._inbox.put(CANCEL_ALL)

    def stop(self) -> None:
        """Finish the present step, cancel what is left, and end the thread."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_age_s(self) -> float:
        """Seconds that the present step has taken so far; 0 between steps."""
        since = self._step_since
        return 0.0 if since is None else time.monotonic() - since

    def report(
        self,
        pages_held: int,
        bytes_copied: int = 0,
        prefixes_skipped: Mapping[str, int] = MappingProxyType({}),
    ) -> Report:
        return Report(
            name=self.name,
            running=self._running,
            waiting=self._inbox.qsize(),
            pages_held=pages_held,
            busy_s=self._busy_s,
            step_age_s=self.step_age_s,
            longest_step_s=max(self._steps_s, default=0.0),
            bytes_copied=bytes_copied,
            prefixes_skipped=dict(prefixes_skipped),
        )

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except PoolError as error:  # nothing that is held here means anything any more
            logger.warning("%s: the compute loop ends: %s", self.name, error)
        finally:
            self._cores.set_prefilling(
                has_more=False
            )  # whoever writes need not wait for this one any more
            self._engines = ()  # with what they have of a GPU's memory: the next ones need it

    def _serve(self) -> None:
        while self._wait():
            for engine in self._engines:
                self._take_turn(engine)
            self._running = sum(len(engine.requests()) for engine in self._engines)
        for engine in self._engines:
            engine.cancel(engine.requests())

    def _wait(self) -> bool:
        """Sleep until there is something to do. False: stop.

        What an engine waits for may come without a message, so it is then asked again.
        """
        if self._is_over:
            return False
        if not self._pending and not any(engine.has_work() for engine in self._engines):
            dues = (engine.wait_s() for engine in self._engines)
            due_s = min((due for due in dues if due is not None), default=None)
            with suppress(queue.Empty):
                self._pending.append(self._inbox.get(timeout=due_s))
        return True

    def _take_turn(self, engine: Engine) -> None:
        """Hear what came, and step once; who is late goes on for as long as others just computed.

        Messages do not take turns of their own: with one more after each, it would never step.
        """
        if not (engine.has_work() or self._pending or self._inbox.qsize()):
            self._waits_since.pop(engine.stage, None)
            return
        waits_since = self._waits_since.setdefault(engine.stage, time.monotonic())
        with self._cores.step(lambda: self._is_urgent(engine)):
            until = 2 * time.monotonic() - waits_since
            self._take_messages()
            while engine.has_work() and not self._is_over:
                self._send(self._guarded(engine, engine.step))
                if not engine.is_late() or time.monotonic() > until:
                    break
        if self._is_prefill_only:
            self._cores.set_prefilling(engine.has_work())
        self._waits_since[engine.stage] = time.monotonic()
        if not engine.has_work():
            del self._waits_since[engine.stage]

    def _is_urgent(self, engine: Engine) -> bool:
        """Answers can wait while prompts are read: more of them are then written in one step."""
        if not self._is_decode_only:
            return True
        self._take_messages()
        return self._is_over or engine.is_late()

    def _take_messages(self) -> None:
        """Take all that has come by now."""
        with suppress(queue.Empty):
            while True:
                self._pending.append(self._inbox.get_nowait())
        while self._pending and not self._is_over:
            message = self._pending.popleft()
            if message is None:
                self._is_over = True
            else:
                self._accept(message)

    def _accept(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._cancel(message)
            return
        for engine in self._engines:
            sends = self._guarded(engine, lambda engine=engine: engine.accept(message), message)
            if sends is not None:
                self._send(sends)
                return
        logger.warning("%s: no stage here takes %s", self.name, type(message).__name__)

    def _cancel(self, message: Cancel) -> None:
        """Let go of requests in every stage, then tell the router that nothing of them is left."""
        for engine in self._engines:
            if message is CANCEL_ALL:
                engine.abandon()
            else:
                engine.cancel(message.requests)
        acks = [Finished(request=request, tokens=0) for request in message.requests]
        self._send(Send(ROUTER, ack) for ack in acks)

    def _guarded(
        self,
        engine: Engine,
        work: Work,
        message: Message | None = None,
    ) -> Iterable[Send] | None:
        """Run one piece of work; a fault in it ends the requests of that engine, not the worker."""
        try:
            with self._clocked():
                return self._around(engine, work)
        except Exception as error:
            logger.exception("%s: %s failed", self.name, engine.stage)
            lost = engine.requests() if message is None else requests_of(message)
            engine.cancel(lost)
            cause = error if isinstance(error, TriptychError) else TriptychError("internal error")
            return [refuse(request, cause) for request in lost]

    @contextmanager
    def _clocked(self) -> Generator[None]:
        started = self._step_since = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - started
            self._busy_s += took_s
            self._steps_s.append(took_s)
            self._step_since = None

    def _send(self, sends: Iterable[Send] | None) -> None:
        ready = list(sends or ())
        if ready:
            self._deliver(ready)


def _run_unwrapped(_engine: Engine, work: Work) -> Iterable[Send] | None:
    return work()
