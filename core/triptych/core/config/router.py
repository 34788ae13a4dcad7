"""The router."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from triptych.core.config.values import require


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, or brackets that do not match
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Scheduling: batching, placement, queueing and admission."""

    batch_policy: str = "greedy_by_memory"
    """How waiting requests are chosen, and in what batches they go: ``greedy_by_memory``,
    ``dynamic`` (the same, in batches whose sizes follow the load), the baselines ``fcfs`` and
    ``static:p<X>c<Y>d<Z>`` (batches of fixed sizes, as in ``static:p2c2d8``), or ``module:object``:
    a policy of your own (docs/extending.md)."""

    placement: str = "least_bytes"
    """Prefill worker of a prompt: ``least_bytes`` (the one with the fewest queued tokens whose
    arena has free bytes), ``power_of_two``, ``prefix_affinity`` and ``dualmap`` (where its prefix
    is cached, which matters on several nodes: each has its own cache), the baseline
    ``single_hash``, or ``module:object``: a policy of your own (docs/extending.md)."""

    affinity_ttft_s: float = 2.0
    """``dualmap``: predicted TTFT in seconds above which a prompt goes to a shorter queue instead
    of its cached prefix, unless the request sets ``ttft_slo_ms``."""

    max_overtake_s: float = 5.0
    """Seconds of waiting after which no other request of the same tenant may overtake a request."""

    ageing_s: float = 10.0
    """Seconds of waiting that count as much as one step of ``priority``."""

    max_queued_requests: int = 256
    """Maximum number of waiting requests; further ones are answered with 429. If a tenant with more
    of them waits, its newest one is answered with 429 instead."""

    prefill_batch_tokens: int = 2048
    """Maximum prompt tokens sent to one prefill worker at once. A longer prompt is sent alone and
    then counts for half of its tokens, so that shorter ones may overtake it."""

    shards: int = 1
    """Number of routers, each with its own pool and an equal part of all workers and bytes. A hash
    of the beginning of a prompt selects its shard."""

    shard_overload: float = 1.25
    """Maximum load of a shard, as a multiple of the mean over all shards, in bytes of pages of the
    requests of one ingress; above it, the next shard on the hash ring is used. Above 1."""

    booking: Literal["forecast", "bounds"] = "forecast"
    """Bytes of pages that are booked for a request: ``forecast`` (what it will take soon, learned
    from earlier answers; more is booked as it grows, and if memory runs short, old tokens lose
    precision, then the youngest requests are preempted) or ``bounds`` (all that it can take until
    ``max_tokens``, so that no request ever waits once it runs). Batches of fixed size
    (``static:``) always use bounds."""

    overcommit_risk: float = 0.0005
    """``booking: forecast``: probability with which the running requests of an arena may come to
    need more than its memory. New ones start while it is not higher. Above 0, up to 0.5."""

    rebalance_requests: int = 2
    """Difference in running requests between two decode workers above which one request migrates to
    the other; 0: none migrates."""

    roles: Literal["both", "dynamic"] = "both"
    """What workers of all stages do (``topology: colocated``): ``both`` read prompts and write
    answers, all of them; ``dynamic``: as many as it takes at the moment only read, and the others
    write, so that answers do not wait for the prompts of others."""

    record: str = ""
    """File that records every message to the router, prompts included, with its decisions, for
    ``triptych simulate replay``; empty: none."""

    otlp_traces_endpoint: str = ""
    """URL for OpenTelemetry traces of requests, OTLP over HTTP, such as
    ``http://127.0.0.1:4318/v1/traces``; empty: none. Traces contain sizes and times, no text."""

    def __post_init__(self) -> None:
        require(self.max_overtake_s >= 0, "router.max_overtake_s", self.max_overtake_s, ">= 0")
        limit_s = self.affinity_ttft_s
        require(limit_s > 0, "router.affinity_ttft_s", limit_s, "> 0")
        url = self.otlp_traces_endpoint
        fits = not url or _is_http(url)
        require(fits, "router.otlp_traces_endpoint", url, "an http:// or https:// URL, or nothing")
        require(self.shards >= 1, "router.shards", self.shards, ">= 1")
        times = self.shard_overload  # at 1 a request might find no shard below the bound
        require(times > 1, "router.shard_overload", times, "> 1")
        risk = self.overcommit_risk
        require(0 < risk <= 0.5, "router.overcommit_risk", risk, "above 0, up to 0.5")
        gap = self.rebalance_requests  # a move that 1 allows could be undone for ever
        require(gap == 0 or gap >= 2, "router.rebalance_requests", gap, "0, or 2 and more")
        require(self.ageing_s > 0, "router.ageing_s", self.ageing_s, "> 0")
        require(
            self.max_queued_requests >= 1,
            "router.max_queued_requests",
            self.max_queued_requests,
            ">= 1",
        )
        require(
            self.prefill_batch_tokens >= 1,
            "router.prefill_batch_tokens",
            self.prefill_batch_tokens,
            ">= 1",
        )
