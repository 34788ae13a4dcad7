"""View of ``triptych top``: figures from two samples of /metrics, and their rendering."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from triptych.cli.output import make_table
from triptych.cli.serving.scrape import Metrics

WAITING = {
    "prefill": ("waiting",),
    "compress": ("prefilled",),
    "decode": ("planned", "compressed", "evicting"),
}
WORKING = {
    "prefill": ("prefilling",),
    "compress": ("compressing", "encoding"),
    "decode": ("decoding",),
}
"""States of the router that count as waiting for a stage, and as running in it."""

OWNERS = {"requests": "green", "prefixes": "cyan", "stock": "yellow", "free": "dim"}
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage at the time of a sample."""

    name: str
    workers: int
    waiting: int
    """Requests that wait for it."""
    working: int
    """Requests in it."""
    busy: float | None
    """Mean share of the interval in which its workers computed; None for the first sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopFigures:
    """All figures of one screen. Rates are of the interval between two samples."""

    answers: int
    """Requests that clients wait for, running or not."""
    written_per_s: float
    """Output tokens."""
    read_per_s: float
    """Prompt tokens, cached ones included."""
    cached_share: float | None
    """Share of prompt tokens from the prefix cache; None without prompt tokens."""
    first_token_s: float | None
    """Mean TTFT; None without a first token."""
    between_tokens_s: float | None
    rejected_per_s: float
    failed_per_s: float
    stages: tuple[Stage, ...]
    oldest_waiting_s: float
    booked: float
    """Booked share of the page memory for requests."""
    pages: Mapping[str, int]
    """By owner; empty while the pool does not answer."""
    page_bytes: int
    compression: float | None
    """Stored bytes over the bytes in 16 bits, since the server started."""


def figures_between(now: Metrics, before: Metrics | None, seconds: float) -> TopFigures:
    """Figures of a sample, with rates over the ``seconds`` since the sample ``before``."""
    change = Change(now, before or now, seconds)
    raw = now.total("triptych_kv_raw_bytes_total")
    capacity = now.total("triptych_router_capacity_bytes")
    return TopFigures(
        answers=int(now.total("triptych_num_requests_open")),
        written_per_s=change.rate("triptych_generation_tokens_total"),
        read_per_s=change.rate("triptych_prompt_tokens_total"),
        cached_share=change.ratio(
            "triptych_prompt_tokens_cached_total", "triptych_prompt_tokens_total"
        ),
        first_token_s=change.mean("triptych_time_to_first_token_seconds"),
        between_tokens_s=change.mean("triptych_inter_token_latency_seconds"),
        rejected_per_s=change.rate("triptych_admission_rejections_total"),
        failed_per_s=change.rate("triptych_request_failed_total"),
        stages=tuple(_stage(name, now, change, before is not None) for name in WAITING),
        oldest_waiting_s=now.total("triptych_router_oldest_waiting_seconds"),
        booked=now.total("triptych_router_booked_bytes") / capacity if capacity else 0.0,
        pages=_pages(now),
        page_bytes=int(now.total("triptych_pool_page_bytes")),
        compression=now.total("triptych_kv_stored_bytes_total") / raw if raw else None,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Change between two samples. A counter that fell was reset."""

    now: Metrics
    before: Metrics
    seconds: float

    def of(self, name: str, **labels: str) -> float:
        return max(0.0, self.now.total(name, **labels) - self.before.total(name, **labels))

    def rate(self, name: str) -> float:
        return self.of(name) / self.seconds if self.seconds > 0 else 0.0

    def ratio(self, part: str, whole: str) -> float | None:
        return self.of(part) / self.of(whole) if self.of(whole) else None

    def mean(self, histogram: str) -> float | None:
        return self.ratio(f"{histogram}_sum", f"{histogram}_count")


def _stage(name: str, now: Metrics, change: Change, has_past: bool) -> Stage:
    states = now.by_label("triptych_router_requests", "state")
    workers = int(now.total("triptych_workers", stage=name))
    return Stage(
        name=name,
        workers=workers,
        waiting=int(sum(states.get(state, 0) for state in WAITING[name])),
        working=int(sum(states.get(state, 0) for state in WORKING[name])),
        busy=_busy(name, change) if has_past and change.seconds > 0 else None,
    )


def _busy(stage: str, change: Change) -> float | None:
    """A worker's name begins with its stages: ``decode-1f2e``, or all three when colocated."""
    now = change.now.by_label("triptych_workers_busy_seconds", "worker")
    before = change.before.by_label("triptych_workers_busy_seconds", "worker")
    mine = [name for name in now if stage in name.split("-")]
    shares = [max(0.0, now[n] - before.get(n, now[n])) / change.seconds for n in mine]
    return min(1.0, sum(shares) / len(shares)) if shares else None


def _pages(now: Metrics) -> dict[str, int]:
    if not now.total("triptych_pool_up"):
        return {}
    names = {
        owner: f"triptych_pool_pages_in_{owner}" for owner in ("requests", "prefixes", "stock")
    }
    names["free"] = "triptych_pool_pages_free"
    return {owner: int(now.total(name)) for owner, name in names.items()}


# ------------------------------------------------------------------ rendering


def render(figures: TopFigures, url: str) -> RenderableType:
    """Render the figures as text, at most 80 columns wide."""
    return Group(_headline(figures, url), Text(), _stages(figures), Text(), _memory(figures))


def _headline(figures: TopFigures, url: str) -> Table:
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        Text(url, style="bold"),
        f"{figures.answers} answers in progress",
        f"{figures.written_per_s:.1f} tokens/s written",
        f"{figures.read_per_s:.1f} read",
    )
    grid.add_row(
        f"first token {_seconds(figures.first_token_s)}",
        f"between tokens {_seconds(figures.between_tokens_s)}",
        f"{_share(figures.cached_share)} cached",
        _trouble(figures),
    )
    return grid


def _trouble(figures: TopFigures) -> Text:
    text = f"{figures.rejected_per_s:.1f}/s refused {figures.failed_per_s:.1f}/s failed"
    return Text(text, style="red" if figures.rejected_per_s + figures.failed_per_s > 0 else "dim")


def _stages(figures: TopFigures) -> RenderableType:
    rows = [
        (one.name, one.workers, one.waiting, one.working, _share(one.busy))
        for one in figures.stages
    ]
    columns = ("stage", "workers", "waiting", "working", "busy")
    return Group(
        f"the oldest waiting request has waited {figures.oldest_waiting_s:.1f} s",
        make_table(columns, rows),
    )


def _memory(figures: TopFigures) -> RenderableType:
    if not figures.pages:
        return Text("the pool does not answer", style="red")
    total = sum(figures.pages.values())
    table = Table.grid(padding=(0, 2))
    for owner, count in figures.pages.items():
        bar = ProgressBar(
            total=total or 1, completed=count, width=BAR_WIDTH, complete_style=OWNERS[owner],
            finished_style=OWNERS[owner],
        )  # fmt: skip
        table.add_row(owner, bar, f"{count}", f"{count * figures.page_bytes / 2**20:.0f} MiB")
    return Group(
        f"{total} pages of {figures.page_bytes} bytes; {figures.booked:.0%} of what requests may "
        f"book is booked; stored at {_share(figures.compression)} of 16 bits",
        table,
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
