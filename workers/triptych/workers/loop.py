"""The one thread in which a worker computes: takes messages, steps its engines, sends results."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from triptych.core.errors import PoolError, TriptychError
from triptych.core.messages import (
    ROUTER,
    Cancel,
    Finished,
    Message,
    Report,
    Send,
    Stage,
)
from triptych.kernels.codegen.compile_time import compile_seconds
from triptych.workers.core_scheduler import Cores
from triptych.workers.sampling.grammar import GrammarMatcherFactory
from triptych.workers.sampling.preparation import GrammarPreparation
from triptych.workers.stage import Engine, refuse, requests_of

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Send]], None]
"""Delivers the messages of a step; called in the loop's thread, must not block."""


Work = Callable[[], Iterable[Send] | None]
StepWrapper = Callable[[Engine, Work], Iterable[Send] | None]
"""Runs a piece of work of an engine and can measure it."""

MEASURED_STEPS = 512
"""Number of recent steps whose longest time is reported."""

CANCEL_ALL = Cancel(requests=())
"""Stands for every request that the worker holds."""


@dataclass(frozen=True)
class StepStart:
    """When a step began."""

    at: float = field(default_factory=time.monotonic)
    _compile_s: float = field(default_factory=compile_seconds)

    def age_s(self) -> float:
        """Seconds since then in which no kernel was compiled."""
        return max(0.0, time.monotonic() - self.at - (compile_seconds() - self._compile_s))


class StageLoop:
    """Runs the engines of one worker process, in turn, while any of them has work.

    With nothing to do the thread sleeps on its inbox, so an idle worker uses no core.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        deliver: Deliver,
        cores: Cores,
        grammars: GrammarMatcherFactory | None = None,
    ) -> None:
        """``grammars``: those of the engines, which are compiled outside of the loop."""
        self.name, self._engines, self._deliver, self._cores = name, engines, deliver, cores
        self._inbox = queue.SimpleQueue[Message | None]()
        self._grammars = GrammarPreparation(self._inbox.put, grammars) if grammars else None
        self._pending = deque[Message | None]()
        """Messages taken from the inbox and not handled yet."""
        self._is_over = False
        self._is_decode_only = [engine.stage for engine in engines] == ["decode"]
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._busy_s = 0.0
        self._steps_s = deque[float](maxlen=MEASURED_STEPS)
        self._step_since: StepStart | None = None
        self._held = tuple[str, ...]()
        self._waits_since = dict[Stage, float]()
        """When each waiting stage began to wait for its turn."""
        self._wrapper: StepWrapper = _run_unwrapped

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Message) -> None:
        """Hand the loop a message; any thread."""
        if self._grammars is None:
            self._inbox.put(message)
        else:
            self._grammars.post(message)

    @contextmanager
    def instrumented(self, wrapper: StepWrapper) -> Generator[None]:
        """Run all work of the engines through ``wrapper`` meanwhile; any thread."""
        self._wrapper = wrapper
        try:
            yield
        finally:
            self._wrapper = _run_unwrapped

    def cancel_all(self) -> None:
        """Cancel every request that is here when the message is taken, and free all pages; any
        thread."""
        if self._grammars is not None:
            self._grammars.drop()
        self._inbox.put(CANCEL_ALL)

    def stop(self) -> None:
        """Finish the current step, cancel all requests and end the thread."""
        if self._grammars is not None:
            self._grammars.close()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step began, without those of compiling kernels; 0 between
        steps."""
        since = self._step_since
        return 0.0 if since is None else since.age_s()

    def report(
        self,
        pages_held: int,
        bytes_copied: int = 0,
        prefixes_skipped: Mapping[str, int] = MappingProxyType({}),
    ) -> Report:
        return Report(
            name=self.name,
            running=len(self._held),
            waiting=self._inbox.qsize(),
            pages_held=pages_held,
            busy_s=self._busy_s,
            step_age_s=self.step_age_s,
            longest_step_s=max(self._steps_s, default=0.0),
            bytes_copied=bytes_copied,
            prefixes_skipped=dict(prefixes_skipped),
        )

    def held(self) -> tuple[str, ...]:
        """Requests that are here, as of the last step; any thread."""
        return self._held

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except PoolError as error:  # the pool is lost, and all pages with it
            logger.warning("%s: the compute loop ends: %s", self.name, error)
        finally:
            # Others need not leave cores any more.
            self._cores.set_working(has_more=False, has_prompts=False)
            self._engines = ()  # frees their GPU memory for the next engines

    def _serve(self) -> None:
        while self._wait():
            for engine in self._engines:
                self._take_turn(engine)
            self._held = tuple(chain.from_iterable(one.requests() for one in self._engines))
        for engine in self._engines:
            engine.cancel(engine.requests())

    def _wait(self) -> bool:
        """Sleep until there is work. False: stop.

        An engine can wait for something that comes without a message, so the sleep ends after
        its ``wait_s``.
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
        """Handle messages and step once; a late engine steps on for as long as it waited.

        Messages have no turns of their own: with one more after each, the engine would never step.
        """
        if not (engine.has_work() or self._pending or self._inbox.qsize()):
            self._waits_since.pop(engine.stage, None)
            return
        waits_since = self._waits_since.setdefault(engine.stage, time.monotonic())
        with self._cores.step(
            lambda: self._is_urgent(engine),
            engine.core_use(),
        ):
            until = 2 * time.monotonic() - waits_since
            self._take_messages()
            while engine.has_work() and not self._is_over:
                self._send(self._guarded(engine, engine.step))
                if not engine.is_late() or time.monotonic() > until:
                    break
        self._cores.set_working(
            has_more=any(one.has_work() for one in self._engines),
            has_prompts=any(one.requests() for one in self._engines if one.stage != "decode"),
        )
        self._waits_since[engine.stage] = time.monotonic()
        if not engine.has_work():
            del self._waits_since[engine.stage]

    def _is_urgent(self, engine: Engine) -> bool:
        """Whether a step cannot wait for prefill; a decode worker that is not late can.

        After the wait more requests are decoded in one step.
        """
        if not self._is_decode_only:
            return True
        self._take_messages()
        return self._is_over or engine.is_late()

    def _take_messages(self) -> None:
        """Handle all messages in the inbox."""
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
        """Cancel requests in every stage, then acknowledge to the router that they hold nothing."""
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
        """Run one piece of work; an exception ends the requests of that engine, not the worker."""
        try:
            with self._clocked():
                return self._wrapper(engine, work)
        except Exception as error:
            logger.exception("%s: %s failed", self.name, engine.stage)
            lost = engine.requests() if message is None else requests_of(message)
            engine.cancel(lost)
            cause = error if isinstance(error, TriptychError) else TriptychError("internal error")
            return [refuse(request, cause) for request in lost]

    @contextmanager
    def _clocked(self) -> Generator[None]:
        started = self._step_since = StepStart()
        try:
            yield
        finally:
            self._busy_s += time.monotonic() - started.at
            self._steps_s.append(started.age_s())
            self._step_since = None

    def _send(self, sends: Iterable[Send] | None) -> None:
        ready = list(sends or ())
        if ready:
            self._deliver(ready)


def _run_unwrapped(_engine: Engine, work: Work) -> Iterable[Send] | None:
    return work()
