"""Settings of every component: frozen dataclasses, one owner per value, units in names."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self
from urllib.parse import urlsplit

from triptych.core.errors import ConfigError
from triptych.core.layout import PAGE_ALIGN_BYTES, page_format
from triptych.core.plugins import COMPRESSION_POLICIES
from triptych.core.schema import SchemaError, build

GIB = 1 << 30
MIB = 1 << 20

DType = Literal["float32", "bfloat16", "float16"]
Auto = Literal["auto"]


def require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` naming the field, the value and what was expected."""
    if not ok:
        raise ConfigError(f"{name}={value!r}: expected {expected}")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, or brackets that do not match
        return False


def cache_dir() -> Path:
    """Where models and kernels are kept: ``TRIPTYCH_CACHE_DIR`` or ``~/.cache/triptych``."""
    return Path(os.environ.get("TRIPTYCH_CACHE_DIR") or Path.home() / ".cache" / "triptych")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and in what precision it computes."""

    name: str = "smollm2-135m-instruct"
    """A known name, a directory in Hugging Face's form, a ``.gguf`` file, or a hub name."""

    served_name: str = ""
    """What clients call it; empty: the last part of ``name``."""

    dtype: DType = "bfloat16"
    """Type of weights and activations."""

    max_context_tokens: int | Literal["auto"] = "auto"
    """Tokens that it reads at once; ``auto``: as many as it was trained for."""

    longest_tokens: int = 0
    """Longest prompt plus answer; more than the context: it is read in windows. 0: the context."""

    window_overlap_tokens: int | Literal["auto"] = "auto"
    """Tokens of a window that the next one begins with; ``auto``: half of the context."""

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "a name or a path")
        tokens = self.max_context_tokens
        require(tokens == "auto" or tokens > 1, "model.max_context_tokens", tokens, "'auto' or > 1")
        require(self.longest_tokens >= 0, "model.longest_tokens", self.longest_tokens, ">= 0")
        overlap = self.window_overlap_tokens
        require(
            overlap == "auto" or overlap > 0,
            "model.window_overlap_tokens",
            overlap,
            "'auto' or > 0",
        )

    @property
    def public_name(self) -> str:
        return self.served_name or Path(self.name).stem.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """How many copies of a stage run, and what each copy gets."""

    num_replicas: int = 1
    """Copies of the stage, each an actor of its own."""

    num_cpus: float = 0.0
    """CPUs that Ray sets aside per copy; 0 lets the stages of a small machine share its cores."""

    num_gpus: float = 0.0
    """GPUs that Ray sets aside per copy, which then computes on one; 0: it computes on the CPU."""

    resources: dict[str, float] = field(default_factory=dict[str, float])
    """Custom resources of Ray that a copy takes, such as ``fast_disk: 0.01``: they say on which
    nodes it may run."""

    threads: int | Literal["auto"] = "auto"
    """Compute threads per copy; ``auto``: all cores of the machine, in turns with other stages, or
    one if the copy has a GPU."""

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "num_replicas", self.num_replicas, ">= 1")
        require(self.num_cpus >= 0, "num_cpus", self.num_cpus, ">= 0")
        require(self.num_gpus >= 0, "num_gpus", self.num_gpus, ">= 0")
        positive = all(amount > 0 for amount in self.resources.values())
        require(positive, "resources", self.resources, "amounts > 0")
        require(
            self.threads == "auto" or self.threads >= 1, "threads", self.threads, "'auto', >= 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """Whether a stage gets more copies when it has much to do, and fewer when it has not."""

    max_replicas: int = 0
    """The most copies; 0: always ``actor.num_replicas``. It begins with that many."""

    min_replicas: int = 1
    """The fewest."""

    target_utilization: float = 0.7
    """Share of the copies' time, or of their decode slots, that is to be in use."""

    upscale_delay_s: float = 10.0
    """Seconds for which more copies must be wanted before they are started."""

    downscale_delay_s: float = 300.0
    """Seconds for which fewer must do before some are stopped; what they have goes on elsewhere."""

    def __post_init__(self) -> None:
        most, least = self.max_replicas, self.min_replicas
        require(least >= 1, "autoscaling.min_replicas", least, ">= 1")
        fits = most == 0 or most >= least
        require(fits, "autoscaling.max_replicas", most, f"0, or min_replicas ({least}) and more")
        share = self.target_utilization
        require(0 < share <= 1, "autoscaling.target_utilization", share, "above 0, up to 1")
        for name in ("upscale_delay_s", "downscale_delay_s"):
            require(getattr(self, name) >= 0, f"autoscaling.{name}", getattr(self, name), ">= 0")

    @property
    def is_on(self) -> bool:
        return self.max_replicas > 0

    def check(self, actor: ActorConfig, stage: str) -> None:
        """Raise ConfigError if a stage begins with a number that it may not have."""
        count, least, most = actor.num_replicas, self.min_replicas, self.max_replicas
        fits = not self.is_on or least <= count <= most
        expected = f"from {stage}.autoscaling.min_replicas ({least}) to max_replicas ({most})"
        require(fits, f"{stage}.actor.num_replicas", count, expected)

    def most(self, actor: ActorConfig) -> int:
        """Copies that there may ever be at once."""
        return max(actor.num_replicas, self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The stage that reads prompts."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    chunk_tokens: int = 512
    """Prompt tokens of one step; longer prompts take several steps."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "prefill")
        require(self.chunk_tokens >= 1, "prefill.chunk_tokens", self.chunk_tokens, ">= 1")


def check_policy(name: str) -> None:
    """Raise ConfigError unless ``name`` is a policy, and its format one that pages have."""
    kind, _, form = name.partition(":")
    if kind == "uniform":
        page_format(form)
        return
    try:
        COMPRESSION_POLICIES.check(name)
    except ConfigError as error:
        expected = "'auto', 'uniform:<format>', 'diffkv', 'leankv' or a plug-in"
        text = f"compressor.policy={name!r}: expected {expected}; {error}"
        raise ConfigError(text) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorConfig:
    """The stage that turns raw pages into compressed ones."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    profile: str = "auto"
    """What calibration found for the model: a file that ``triptych calibrate`` wrote, ``none``, or
    ``auto``: the one that comes with Triptych, if any. It answers for every ``auto`` below."""

    policy: str = "auto"
    """What becomes of each token: ``uniform:<format>`` stores all in one format; ``diffkv`` stores
    significant ones in ``high_format``, others in ``low_format`` or nowhere; ``leankv`` does so by
    their share of all attention; ``module:object`` is a policy of your own (docs/extending.md).
    ``auto`` without a profile: ``uniform:k8v4``."""

    high_format: str = "auto"
    """Format of significant tokens (``diffkv``); ``auto`` without a profile: ``k8v4``."""

    low_format: str = "auto"
    """Format of the less significant ones (``diffkv``); ``auto`` without a profile: ``k4v2``."""

    alpha_high: float | Auto = "auto"
    """A token of n is high if its mean attention from later ones reaches ``alpha_high / n``;
    ``auto`` without a profile: 1."""

    alpha_low: float | Auto = "auto"
    """Below ``alpha_low / n`` it is dropped; 0, which is ``auto`` without a profile, drops none."""

    mass_high: float = 0.05
    """The least significant tokens that together receive less than this share of all attention are
    not high (``leankv``)."""

    mass_low: float = 0.0
    """Those that together receive less than this share are dropped (``leankv``)."""

    recent_window_tokens: int | Auto = "auto"
    """Newest tokens that stay in 16 bits; ``auto`` without a profile: 64."""

    high_window_tokens: int = 64
    """Newest tokens that are high at least: too young to be judged (``diffkv``)."""

    sink_tokens: int = 1
    """First tokens that stay in 16 bits, rounded up to whole pages: attention rests on them."""

    score_every_tokens: int = 8
    """Tokens of an answer from one look at who receives attention to the next (``diffkv``); 0: new
    tokens are never told apart, all that leave the window are high."""

    basis: Literal["auto", "plain", "rotated"] = "auto"
    """In which coordinates pages hold keys and values: as the model makes them, or rotated, which
    spreads outliers over all channels; ``auto``: rotated where a format is quantized."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "compressor")
        require(bool(self.profile), "compressor.profile", self.profile, "'auto', 'none' or a file")
        if self.policy != "auto":
            check_policy(self.policy)
        for name in (self.high_format, self.low_format):
            if name != "auto":
                page_format(name)
        low, high = self.mass_low, self.mass_high
        require(0 <= high <= 1, "compressor.mass_high", high, "0 to 1")
        require(0 <= low <= high, "compressor.mass_low", low, f"0 to mass_high ({high})")
        window = self.recent_window_tokens
        require(window == "auto" or window >= 0, "compressor.recent_window_tokens", window, ">= 0")
        require(self.sink_tokens >= 0, "compressor.sink_tokens", self.sink_tokens, ">= 0")
        young = self.high_window_tokens
        require(young >= 0, "compressor.high_window_tokens", young, ">= 0")
        every = self.score_every_tokens
        require(every >= 0, "compressor.score_every_tokens", every, ">= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Which pages of a long context a decode step reads; by default all."""

    method: Literal["none", "moments", "box"] = "none"
    """How pages are ranked for each query: by means and deviations of quarters of their keys, or by
    the box around them; ``none``: every page is read."""

    keep_fraction: float = 0.3
    """Share of each head row's pages that is read, those that are read in any case included."""

    budget_tokens: int = 2048
    """Pages for this many tokens are read at least. Contexts of up to twice as many are read whole:
    there choosing takes longer than it saves, and loses what is asked for later."""

    omitted_mass: float = 0.0
    """More pages are read until the others are expected to receive no more than this share of the
    attention to pages that compete; an estimate (``moments`` alone) that misses single keys in long
    contexts. 0: no more are."""

    sink_tokens: int = 4
    """First tokens whose pages are read in any case: attention rests on them."""

    window_tokens: int = 64
    """Newest tokens whose pages are read in any case."""

    dense_layers: int = 2
    """First layers that read every page."""

    reselect_every: int = 1
    """Tokens of an answer from one choice of pages to the next."""

    request_bounds: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """What requests may set instead, from and to: ``keep_fraction``, ``budget_tokens`` and
    ``omitted_mass``. They may always read every page."""

    def __post_init__(self) -> None:
        kept = self.keep_fraction
        require(0 <= kept <= 1, "decode.selection.keep_fraction", kept, "0 to 1")
        for name in ("budget_tokens", "sink_tokens", "window_tokens", "dense_layers"):
            value = getattr(self, name)
            require(0 <= value < 1 << 31, f"decode.selection.{name}", value, "0 or more")
        mass, told = self.omitted_mass, self.method == "moments"
        expected = "0 to 1; above 0 only with method: moments"
        fits = 0 <= mass < 1 and (mass == 0 or told)
        require(fits, "decode.selection.omitted_mass", mass, expected)
        every = self.reselect_every
        require(every >= 1, "decode.selection.reselect_every", every, ">= 1")
        for name in self.request_bounds:
            expected = f"one of {', '.join(SELECTION_BY_REQUEST)}"
            fits = name in SELECTION_BY_REQUEST
            require(fits, "decode.selection.request_bounds", name, expected)


SELECTION_BY_REQUEST = ("keep_fraction", "budget_tokens", "omitted_mass")
"""Settings of the selection that may differ from request to request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPluginConfig:
    """One plug-in of the decode step."""

    name: str = ""
    """A built-in one, one of an entry point, or ``module:object`` (docs/extending.md)."""

    label: str = ""
    """What requests call it, and who is told as having ended an answer; empty: its name, without
    the module."""

    options: dict[str, int | float | bool | str] = field(
        default_factory=dict[str, int | float | bool | str]
    )
    """Its settings; what is not named has the plug-in's own default."""

    enabled: bool = True
    """Whether requests that say nothing of it have it. They may switch it on and off."""

    request_bounds: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """Options that requests may set themselves, from and to."""

    def __post_init__(self) -> None:
        require(bool(self.name), "decode.plugins.name", self.name, "the name of a plug-in")
        fits = re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.called) is not None
        expected = "up to 64 letters, digits, dots, hyphens and underscores"
        require(fits, "decode.plugins.label", self.called, expected)

    @property
    def called(self) -> str:
        """What requests call it."""
        return self.label or self.name.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The stage that writes answers."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    max_batch_requests: int = 32
    """Requests that one copy decodes at once."""

    plugins: tuple[StepPluginConfig | str, ...] = ()
    """What looks at each step (docs/extending.md): names, or entries with a name and more."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which pages a step reads."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "decode")
        count = self.max_batch_requests
        require(count >= 1, "decode.max_batch_requests", count, ">= 1")

    @property
    def steps(self) -> tuple[StepPluginConfig, ...]:
        """The plug-ins, each as an entry."""
        return tuple(
            StepPluginConfig(name=one) if isinstance(one, str) else one for one in self.plugins
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Shape and budget of the pages of one device."""

    capacity_bytes: int = GIB
    """Page memory, taken in full at start-up, in bytes."""

    arena_path: str = ""
    """Directory on a disk in which the pages lie, so that they may take more than memory: what was
    read lately stays in memory, and ``decode.selection`` has the rest read when it ranks. Empty: in
    ``/dev/shm``. Who can read it can read prompts while they are served."""

    page_bytes: int | Literal["auto"] = "auto"
    """Bytes of one page; ``auto``: 32 tokens of K8V4 fill it exactly (3,584 at head_dim 64), or for
    ``arena_path`` the next multiple of 4,096."""

    lease_ttl_s: float = 10.0
    """Seconds without a heartbeat after which a worker's pages are taken back."""

    extent_pages: int = 1024
    """Pages that a worker asks for at once; it allocates inside them without asking."""

    prefix_bytes: int | Auto = "auto"
    """Page memory, out of ``capacity_bytes``, that keeps prefixes of prompts for later requests;
    ``auto``: a quarter; 0: none is kept."""

    prefix_tenant_bytes: int | Auto = "auto"
    """The most of it that one client's prompts may take; ``auto``: all."""

    prefix_eviction: Literal["cost", "lru"] = "cost"
    """Which prefix goes first when it is full: the one that saves least time per byte, or the one
    that was not used for longest."""

    share_pages: bool = True
    """Whether requests whose prompts begin with a cached prefix read its pages where they lie while
    they decode, so that it is stored once for all of them; else each has a copy, compressed by its
    own attention."""

    keep_answers: Literal["always", "sessions", "never"] = "sessions"
    """Whether answers are kept as prompts are, so that the next turn of a conversation does not
    compute them again: all, those of requests with a ``session_id``, or none."""

    session_ttl_s: float = 300.0
    """Seconds after its last turn for which prefixes of a conversation with a ``session_id`` are
    evicted after all others; 0: they are not."""

    session_tenant_bytes: int | Auto = "auto"
    """The most that one client's conversations have of that; ``auto``: half of
    ``prefix_tenant_bytes``. All clients together have half of ``prefix_bytes``."""

    disk_path: str = ""
    """Directory, of its own, in which prefixes outlive memory and restarts; empty: in none. Who can
    read it can read prompts."""

    disk_bytes: int = 0
    """The most that they take there, in bytes; what was not used for longest goes first."""

    disk_tenant_bytes: int | Auto = "auto"
    """The most of it that one client's prompts may take; ``auto``: all."""

    disk_write_bytes_s: float = 64.0 * MIB
    """Bytes a second at which prefixes are written there; reading, which requests wait for, has no
    limit."""

    def __post_init__(self) -> None:
        require(self.capacity_bytes > 0, "pool.capacity_bytes", self.capacity_bytes, "> 0")
        page = self.page_bytes
        fits = page == "auto" or (page > 0 and page % PAGE_ALIGN_BYTES == 0)
        require(fits, "pool.page_bytes", page, f"'auto' or a multiple of {PAGE_ALIGN_BYTES}")
        require(self.lease_ttl_s > 0, "pool.lease_ttl_s", self.lease_ttl_s, "> 0")
        require(self.extent_pages >= 1, "pool.extent_pages", self.extent_pages, ">= 1")
        kept, limit = self.prefix_bytes, self.capacity_bytes
        fits = kept == "auto" or 0 <= kept < limit
        require(fits, "pool.prefix_bytes", kept, f"'auto' or 0 to capacity_bytes ({limit})")
        own = self.prefix_tenant_bytes
        require(own == "auto" or own >= 0, "pool.prefix_tenant_bytes", own, "'auto' or >= 0")
        ttl_s, most = self.session_ttl_s, self.session_tenant_bytes
        require(ttl_s >= 0, "pool.session_ttl_s", ttl_s, ">= 0")
        require(most == "auto" or most >= 0, "pool.session_tenant_bytes", most, "'auto' or >= 0")
        arena = self.arena_path
        fits = not arena or Path(arena).is_absolute()
        require(fits, "pool.arena_path", arena, "an absolute path, or empty")
        fits = not arena or arena != self.disk_path
        require(fits, "pool.arena_path", arena, "another directory than disk_path")
        self._check_disk()

    @property
    def arena_directory(self) -> Path | None:
        """None: where memory is shared."""
        return Path(self.arena_path) if self.arena_path else None

    @property
    def shared_bytes(self) -> int:
        """Page memory where memory is shared."""
        return 0 if self.arena_path else self.capacity_bytes

    def _check_disk(self) -> None:
        if not self.disk_path:
            require(self.disk_bytes == 0, "pool.disk_bytes", self.disk_bytes, "0 or a disk_path")
            return
        require(self.disk_bytes > 0, "pool.disk_bytes", self.disk_bytes, "> 0 with a disk_path")
        path = Path(self.disk_path)
        require(path.is_absolute(), "pool.disk_path", self.disk_path, "an absolute path")
        require(self.prefix_bytes != 0, "pool.prefix_bytes", 0, "> 0 with a disk_path")
        own, rate = self.disk_tenant_bytes, self.disk_write_bytes_s
        require(own == "auto" or own >= 0, "pool.disk_tenant_bytes", own, "'auto' or >= 0")
        require(rate > 0, "pool.disk_write_bytes_s", rate, "> 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What runs next, where, and whether at all."""

    batch_policy: str = "greedy_by_memory"
    """How waiting requests are chosen, and in what batches they go: ``greedy_by_memory``,
    ``dynamic`` (the same, in batches whose sizes follow the load), the baselines ``fcfs`` and
    ``static:p<X>c<Y>d<Z>`` (batches of fixed sizes, as in ``static:p2c2d8``), or ``module:object``:
    a policy of your own (docs/extending.md)."""

    placement: str = "least_bytes"
    """Who reads a prompt: ``least_bytes`` (the prefill worker with the fewest tokens to read whose
    arena has room), ``power_of_two``, ``prefix_affinity`` and ``dualmap`` (where its beginning is
    cached, which matters on several nodes: each has a cache of its own), the baseline
    ``single_hash``, or ``module:object``: a policy of your own (docs/extending.md)."""

    affinity_ttft_s: float = 2.0
    """Predicted seconds to the first token from which on ``dualmap`` leaves the cached beginning of
    a prompt for a shorter queue, if the request does not say ``ttft_slo_ms``."""

    patience_s: float = 5.0
    """Seconds after which a waiting request can no longer be overtaken by its tenant's others."""

    ageing_s: float = 10.0
    """Seconds of waiting that count as much as one step of ``priority``."""

    max_queued_requests: int = 256
    """Requests that may wait; one more is answered with 429."""

    prefill_batch_tokens: int = 2048
    """Prompt tokens that are sent to one prefill worker at once. A longer prompt is sent alone, and
    counts for half of it from then on: shorter ones may overtake it."""

    cells: int = 1
    """Routers behind one ingress, each with a pool and workers of its own: an equal part of all
    replicas and bytes. A prompt goes to the cell that a hash of its beginning says."""

    cell_overload: float = 1.25
    """Times the mean of all cells that one of them may hold of an ingress's requests, in bytes of
    pages, before the next one takes what would be its own. Above 1."""

    rebalance_requests: int = 2
    """Requests that a decode worker must have more than another one before one of them is moved
    there while it is being answered; 0: none ever is."""

    roles: Literal["both", "switch"] = "both"
    """What workers of all stages do (``topology: colocated``): ``both`` read prompts and write
    answers, all of them; ``switch``: as many as it takes at the moment only read, and the others
    write, so that answers do not wait for the prompts of others."""

    record: str = ""
    """File to which every message to the router is written, prompts included, with what it
    decided, for ``triptych simulate replay``; empty: none."""

    trace_url: str = ""
    """Where OpenTelemetry traces of requests go, in OTLP over HTTP, such as
    ``http://127.0.0.1:4318/v1/traces``; empty: nowhere. They tell sizes and times, and no text."""

    def __post_init__(self) -> None:
        require(self.patience_s >= 0, "router.patience_s", self.patience_s, ">= 0")
        limit_s = self.affinity_ttft_s
        require(limit_s > 0, "router.affinity_ttft_s", limit_s, "> 0")
        url = self.trace_url
        fits = not url or _is_http(url)
        require(fits, "router.trace_url", url, "an http:// or https:// URL, or nothing")
        require(self.cells >= 1, "router.cells", self.cells, ">= 1")
        times = self.cell_overload  # at 1 a request might find no cell below the bound
        require(times > 1, "router.cell_overload", times, "> 1")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP side, and gRPC beside it."""

    num_replicas: int = 1
    """Copies of the HTTP ingress."""

    grpc_port: int = 0
    """Port on which every copy of the ingress answers gRPC as well (``triptych.proto``), with the
    same checks, limits and keys; 0: none does."""

    grpc_host: str = "127.0.0.1"
    """Address at which it does; ``0.0.0.0``: at all that its node has."""

    max_body_bytes: int = 4 * MIB
    """Largest request body; a larger one is answered with 413."""

    max_choices: int = 8
    """Largest ``n`` of one request."""

    request_timeout_s: float = 600.0
    """Seconds after which a request is given up."""

    api_keys: str = ""
    """File with the digests of API keys and the limits of each; empty: everybody may ask."""

    open_admin: bool = False
    """Whether everybody may read why the router decided as it did (``/router/explain``), and where
    the time of steps goes (``/profile``), while there is no file of keys; with one, those keys may
    that are marked ``admin``."""

    decision_header: bool = False
    """Whether whole answers say in ``X-Triptych-Decision`` what the router decided."""

    strict_params: bool = False
    """Whether a field of a request that nobody knows is an error (400); else it is let be."""

    vllm_metrics: bool = False
    """Whether ``/metrics`` has the common ones under vLLM's names as well (``vllm:...``), for
    gateways, autoscalers and dashboards that ask for those."""

    share_prefixes: bool = False
    """Whether clients with different keys may share cached prefixes of prompts; by default nobody
    can tell from the time to the first token what others asked."""

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "ingress.num_replicas", self.num_replicas, ">= 1")
        port, host = self.grpc_port, self.grpc_host
        require(0 <= port < 1 << 16, "ingress.grpc_port", port, "0 to 65535")
        require(bool(host.strip()), "ingress.grpc_host", host, "an address")
        require(
            self.max_body_bytes >= 1024, "ingress.max_body_bytes", self.max_body_bytes, ">= 1024"
        )
        require(self.max_choices >= 1, "ingress.max_choices", self.max_choices, ">= 1")
        require(
            self.request_timeout_s > 0, "ingress.request_timeout_s", self.request_timeout_s, "> 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Whom processes of different nodes believe; on one node nothing listens on the network."""

    token_file: str = ""
    """File with the secret that processes of different nodes show each other, at least 16
    characters, at the same path on every node; empty: one is made for each start."""

    tls_cert_file: str = ""
    """PEM certificate that every node shows to others; empty: no encryption between nodes."""

    tls_key_file: str = ""
    """PEM private key of the certificate."""

    tls_ca_file: str = ""
    """PEM certificates of who signed them; a peer without a certificate of theirs is refused."""

    tls_server_name: str = ""
    """Name that the certificates are made out for; empty: the IP address of each node."""

    def __post_init__(self) -> None:
        files = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        together = "all three files, or none of them"
        require(all(files) or not any(files), "network.tls_{cert,key,ca}_file", files, together)
        if self.tls_server_name:
            name = self.tls_server_name
            require(all(files), "network.tls_server_name", name, "tls_cert_file beside it")


class WorkerGroup(NamedTuple):
    """Workers that are alike."""

    actor: ActorConfig
    most: int
    """Copies that there may ever be at once, if the group is scaled."""

    @property
    def most_cpus(self) -> float:
        return self.actor.num_cpus * self.most

    @property
    def most_gpus(self) -> float:
        return self.actor.num_gpus * self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Everything under ``args:`` of ``config.yaml``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""

    topology: Literal["disaggregated", "colocated"] = "disaggregated"
    """``disaggregated``: an actor per stage; ``colocated``: the same engines in one process."""

    node_resource: str = ""
    """A custom Ray resource: every actor of this application runs on nodes that have it. Empty: on
    all nodes. If there are several, each has a pool of its own."""

    min_nodes: int = 1
    """How many nodes to wait for before the application starts. If there are several by then, it
    uses those that join later too; if there is one, it keeps to that."""

    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """The prefill stage."""

    compressor: CompressorConfig = field(default_factory=CompressorConfig)
    """The compressor stage."""

    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """The decode stage."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """The page pool."""

    router: RouterConfig = field(default_factory=RouterConfig)
    """The router."""

    ingress: IngressConfig = field(default_factory=IngressConfig)
    """The HTTP ingress."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    """What passes between nodes."""

    def __post_init__(self) -> None:
        require(self.min_nodes >= 1, "min_nodes", self.min_nodes, ">= 1")
        fits = self.router.roles == "both" or self.topology == "colocated"
        expected = "'both', or topology: colocated (other workers have the role of their stage)"
        require(fits, "router.roles", self.router.roles, expected)
        on_gpus = [name for name, group in self.worker_groups().items() if group.actor.num_gpus]
        fits = not self.pool.arena_path or not on_gpus
        expected = f"empty while num_gpus > 0 ({', '.join(on_gpus)}): a GPU cannot read a disk"
        require(fits, "pool.arena_path", self.pool.arena_path, expected)
        for stage, (actor, scaling) in self._deployed.items():
            self._check_cells(f"{stage}.actor.num_replicas", actor.num_replicas)
            if scaling.is_on:
                self._check_cells(f"{stage}.autoscaling.min_replicas", scaling.min_replicas)
                self._check_cells(f"{stage}.autoscaling.max_replicas", scaling.max_replicas)

    @property
    def _deployed(self) -> dict[str, tuple[ActorConfig, AutoscalingConfig]]:
        """Stages whose settings say how many workers there are."""
        decode = {"decode": (self.decode.actor, self.decode.autoscaling)}
        if self.topology == "colocated":
            return decode
        return {
            "prefill": (self.prefill.actor, self.prefill.autoscaling),
            "compressor": (self.compressor.actor, self.compressor.autoscaling),
            **decode,
        }

    def _check_cells(self, name: str, count: int) -> None:
        """Raise ConfigError unless each cell gets as many workers as every other one."""
        cells = self.router.cells
        expected = f"a multiple of router.cells ({cells}), since each cell has workers of its own"
        require(count % cells == 0, name, count, expected)

    def worker_groups(self) -> dict[str, WorkerGroup]:
        """What Ray starts to compute: a group per stage, or one, sized by ``decode``."""
        stages = {"prefill": self.prefill, "compressor": self.compressor, "decode": self.decode}
        if self.topology == "colocated":
            stages = {"decode": self.decode}
        return {
            name: WorkerGroup(stage.actor, stage.autoscaling.most(stage.actor))
            for name, stage in stages.items()
        }

    def autoscaling(self, stage: Literal["prefill", "compress", "decode"]) -> AutoscalingConfig:
        """When a stage gets more copies."""
        by_stage = {
            "prefill": self.prefill.autoscaling,
            "compress": self.compressor.autoscaling,
            "decode": self.decode.autoscaling,
        }
        return by_stage[stage]

    @classmethod
    def from_mapping(cls, data: Mapping[str, object]) -> Self:
        """Build from parsed YAML.

        Raises: ConfigError naming the key, the value and what was expected
        """
        try:
            return build(cls, data)
        except SchemaError as error:
            raise ConfigError(str(error)) from error
