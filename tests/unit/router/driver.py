"""A coordinator with a clock, whose workers a test speaks for."""

from math import inf
from typing import Literal

from triptych.core.config import RouterConfig
from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.layout import Geometry
from triptych.core.messages import (
    POOL,
    Compressed,
    CompressionReport,
    Expel,
    Failed,
    Message,
    Planned,
    Prefill,
    Prefilled,
    Register,
    Report,
    Request,
    Sampling,
    Send,
    Stage,
    Submit,
)
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.router import ByteModel, Scheduler, Timeouts

POLICY = Policy(name="uniform:k8v4", high_format="k8v4")
MODEL = ByteModel(PagePlan(Geometry(layers=1, kv_heads=1, head_dim=64), 3584, POLICY))
TIMEOUTS = Timeouts(
    report_bound_s=3.0, grace_s=30.0, cancel_timeout_s=1.0, reclaim_s=10.0, silent_s=inf
)
REPORT = CompressionReport(policy="uniform:k8v4", raw_bytes=10, stored_bytes=4)
WORKERS: dict[str, tuple[Stage, ...]] = {
    "P": ("prefill",),
    "C": ("compress",),
    "D": ("decode",),
    "E": ("decode",),
    "I": ("encode",),
    "J": ("encode",),
}
ALL_STAGES: tuple[Stage, ...] = ("prefill", "compress", "decode")
"""Of any other worker."""
Step = Literal[
    "waiting", "prefilling", "prefilled", "compressing", "planned", "encoding", "decoding"
]


def request(name: str = "r", prompt: int = 50, max_tokens: int = 10, to: str = "in") -> Request:
    return Request(
        id=name, prompt=(1,) * prompt, sampling=Sampling(max_tokens=max_tokens), reply_to=to
    )


def handle(name: str, kind: str) -> KVHandle:
    return KVHandle(LeaseRef("arena", LeaseId(hash((name, kind))), 0), (), 50)


class Driver:
    """A coordinator and a clock. Workers are spoken for by the test."""

    def __init__(
        self,
        *workers: str,
        slots: int = 2,
        capacity: int = 10**9,
        arenas: dict[str, str] | None = None,
        timeouts: Timeouts = TIMEOUTS,
        plan: PagePlan = MODEL.plan,
        **config: object,
    ) -> None:
        self.now = 0.0
        self.slots, self.arenas = slots, arenas or {}
        settings = {"max_overtake_s": 5.0, **config}
        self.router = Scheduler(
            RouterConfig(**settings),  # pyright: ignore[reportArgumentType]
            plan,
            capacity,
            timeouts,
        )
        for worker in workers:
            self.register(worker)
        self.on(Register(name="in#1", address="in"), "in")

    def on(self, message: Message, sender: str) -> list[Send]:
        return self.router.on(message, sender, self.now)

    def register(self, address: str, start: int = 1) -> list[Send]:
        stages = WORKERS.get(address, ALL_STAGES)
        registration = Register(
            name=f"{address}#{start}",
            address=address,
            stages=stages,
            max_requests=self.slots if "decode" in stages else 0,
            arena=self.arenas.get(address, ""),
        )
        return [*self.on(registration, address), *self.report(address, start)]

    def report(self, address: str, start: int = 1) -> list[Send]:
        name = f"{address}#{start}"
        return self.on(Report(name=name, running=0, waiting=0, pages_held=0, busy_s=0), address)

    def submit(self, one: Request) -> list[Send]:
        return self.on(Submit(request=one), one.reply_to)

    def prefilled(self, name: str) -> list[Send]:
        raw = handle(name, "raw")
        return self.on(Prefilled(request=name, first_token=7, handle=raw), "P")

    def planned(self, name: str, pages: int = 5) -> list[Send]:
        return self.on(Planned(request=name, pages=pages), "C")

    def compressed(self, name: str) -> list[Send]:
        final = handle(name, "final")
        return self.on(Compressed(request=name, handle=final, report=REPORT), "C")

    def bring_to(self, step: Step, one: Request | None = None) -> list[Send]:
        """Take a request to a step of its life; what the last event caused."""
        one = one or request()
        events = {
            "waiting": lambda: self.submit(one),
            "prefilling": lambda: self.submit(one),
            "prefilled": lambda: self.prefilled(one.id),
            "compressing": lambda: self.prefilled(one.id),
            "planned": lambda: self.planned(one.id),
            "encoding": lambda: self.planned(one.id),
            "decoding": lambda: self.compressed(one.id),
        }
        chain: list[Step] = ["prefilling", "compressing", "encoding", "decoding"]
        before = {"waiting": 0, "prefilled": 1, "planned": 2}.get(step)
        for earlier in chain[: chain.index(step) if before is None else before]:
            events[earlier]()
        return events[step]()

    def state(self, name: str = "r") -> str | None:
        explanation = self.router.explain(name, self.now)
        return explanation and explanation.state

    def tick(self, seconds: float) -> list[Send]:
        """Let time pass, with fresh reports all along."""
        self.now += seconds
        return self.router.tick(self.now)

    @property
    def booked(self) -> int:
        return sum(self.router.snapshot(self.now).booked_bytes.values())

    def count(self, reason: str) -> int:
        return self.router.snapshot(self.now).counters.get(reason, 0)


def whole(**settings: object) -> Driver:
    return Driver(*WORKERS, **settings)  # pyright: ignore[reportArgumentType]


def failures(sends: list[Send]) -> list[Failed]:
    return [send.message for send in sends if isinstance(send.message, Failed)]


def started(sends: list[Send]) -> list[str]:
    return [
        one.id
        for send in sends
        if isinstance(send.message, Prefill)
        for one in send.message.requests
    ]


def expel(worker: str = "D#1") -> Send:
    return Send(POOL, Expel(worker=worker))
