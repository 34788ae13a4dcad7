"""``AppPlan``: what the builder resolves once and passes to every actor of the application."""

import secrets
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from triptych.core.config import MIB, AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.messages import Stage, stages_of
from triptych.core.pages import PagePlan
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.core.shards import shard_of
from triptych.router import ByteModel, ContextLimits, Windows, schedule_named
from triptych.workers.models.vision.vision_traits import VisionTraits


@dataclass(frozen=True)
class AppPlan:
    """The configuration of one shard with everything resolved: model, page layout, addresses."""

    config: AppConfig
    """The configuration of one shard (``core.shards``)."""
    model_path: Path
    pages: PagePlan
    context_tokens: int
    """The model's own context, in tokens; longer sequences are read in windows."""
    revision: str
    """Hash of all that decides what the model computes (``ModelFacts.revision``)."""
    run_dir: Path
    """Directory of the application's sockets, private to this user; one on each node."""
    nodes: int = 1
    """Nodes of the application. With several, processes of different nodes talk over TCP."""
    measured_on: str = ""
    """The model and the texts with which calibration measured methods (``PagePlan.measured``)."""
    offers: tuple[OverridablePlugin, ...] = ()
    """What requests may change about the plug-ins of the decode step."""
    chat_template: str = field(default="", repr=False)
    """Text of the operator's chat template; empty: that of the model."""
    token: str = field(default="", repr=False)
    """Token between processes of different nodes, unless a file is configured."""
    vision: VisionTraits = field(default_factory=VisionTraits)
    """Whether the model reads images, and how."""
    vocab_tokens: int = 0
    """Token ids that the model has: a tokenizer may know more; 0: as many as the tokenizer."""
    shards: int = 1
    """Shards of the application, each with a router of its own."""
    shard: int = 0
    """Index of the shard that this plan is for."""

    def of_shard(self, config: AppConfig, index: int) -> Self:
        """The plan of another shard; ``config`` is that of the whole application."""
        return replace(self, config=shard_of(config, index), shard=index)

    def named(self, role: str) -> str:
        """The name of a deployment or socket of this shard; unchanged if there is one shard."""
        return role if self.shards == 1 else f"{role}-{self.shard}"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the application, in the order of a request."""
        return stages_of(has_images=self.vision.layout is not None)

    @property
    def encode_workers(self) -> int:
        """Most processes with an encode stage."""
        if self.vision.layout is None:
            return 0
        config = self.config
        if config.topology == "colocated":
            return config.decode.autoscaling.most(config.decode.actor)
        stage = config.prefill if config.encode.worker == "prefill" else config.encode
        return stage.autoscaling.most(stage.actor)

    @property
    def windows(self) -> Windows | None:
        """How sequences longer than the context are read; None if they are rejected."""
        return Windows.of(self.config, self.context_tokens)

    @property
    def wanted_model_len(self) -> int:
        """Prompt plus output tokens that settings and model allow, before the pool limits them."""
        asked = self.config.model.max_model_len
        return self.context_tokens if asked == "auto" else max(self.context_tokens, asked)

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens that are served, however they are split."""
        most = self.limits.every_split
        return self.wanted_model_len if most >= self.context_tokens else most

    @property
    def longest_request_tokens(self) -> int:
        """Prompt plus output tokens beyond which nothing is served, however they are split."""
        most = self.limits.total_tokens
        return self.wanted_model_len if most >= self.context_tokens else max(1, most)

    @cached_property
    def limits(self) -> ContextLimits:
        """The longest requests that the pool holds, up to the context (a window, if longer)."""
        schedule = schedule_named(self.config.router.batch_policy)
        return ByteModel(self.pages).limits(
            self.bookable_bytes,
            self.context_tokens,
            is_layerwise=schedule.compress.most is None,
        )

    @property
    def context_warning(self) -> str:
        """One line if the pool holds less than the context that the settings ask for; or empty."""
        served, wanted = self.max_model_len, self.wanted_model_len
        if served >= wanted:
            return ""
        capacity, needed = self.config.pool.kv_cache_memory_bytes, self._capacity_for_context()
        of_all = " for all shards" if self.shards > 1 else ""
        return (
            f"pool.kv_cache_memory_bytes={capacity}{self._each} holds requests of up to {served} "
            f"tokens, less than the context of {wanted}: raise it to {needed} or more"
            f"{of_all}, or set model.max_model_len to {served}"
        )

    def _capacity_for_context(self) -> int:
        """An upper bound of the capacity of all shards that serves the whole context, in 64 MiB."""
        needed = ByteModel(self.pages).estimate(self.context_tokens, 0).peak + self._stock_bytes
        prefixes = self.config.pool.prefix_bytes  # auto: a quarter of the capacity
        whole = -(-needed * 4 // 3) if prefixes == "auto" else needed + prefixes
        step = 64 * MIB
        return -(-(whole + self.pages.page_bytes) // step) * step * self.shards

    @property
    def pool_pages(self) -> int:
        return self.config.pool.kv_cache_memory_bytes // self.pages.page_bytes

    @property
    def bookable_bytes(self) -> int:
        """Page memory that requests may reserve: all but free lists and the caches of prefixes and
        of image features."""
        kept = self._stock_bytes
        if self.config.pool.arena == "host":
            kept += self.pages.prefix_bytes + self._features_bytes
        return self.pool_pages * self.pages.page_bytes - kept

    @property
    def host_arena_bytes(self) -> int:
        """Host memory beside arenas on devices: caches, and blocks before they are published."""
        return self.pages.prefix_bytes * 9 // 8 + self._features_bytes

    @property
    def _features_bytes(self) -> int:
        return self.encode_workers * self.config.encode.cache_bytes

    @property
    def _stock_bytes(self) -> int:
        """Upper bound of the free pages that workers hold back for themselves."""
        return 2 * self.config.pool.extent_pages * self.workers * self.pages.page_bytes

    @property
    def workers(self) -> int:
        """Upper bound of the number of processes that allocate pages."""
        is_apart = self.config.topology != "colocated" and self.config.encode.worker == "own"
        encoders = self.encode_workers if is_apart else 0
        return sum(group.most for group in self.config.worker_groups().values()) + encoders

    @property
    def readers(self) -> int:
        """Number of prefill processes at the start."""
        config = self.config
        stage = config.decode if config.topology == "colocated" else config.prefill
        return stage.actor.num_replicas

    @property
    def cache_tokens(self) -> int:
        """Tokens of requests that fit into a shard, if all of them are significant."""
        rows = self.pages.geometry.head_rows
        return self.bookable_bytes // self.pages.page_bytes // rows * self.pages.high.tokens

    def cache_tokens_in(self, request_tokens: int) -> int:
        """The same for requests of ``request_tokens`` tokens each: more tokens if they are longer
        than the sliding windows of layers."""
        if not self.pages.has_windows:
            return self.cache_tokens
        request_bytes = ByteModel(self.pages).estimate(request_tokens, 0).grown
        return max(self.cache_tokens, self.bookable_bytes * request_tokens // request_bytes)

    def check(self) -> None:
        """Raise ConfigError if windows do not fit the context, the pool is too small, or a plug-in
        drops tokens that the floor keeps."""
        Windows.of(self.config, self.context_tokens)
        self._check_stock()
        self._check_devices()
        self._check_floor()

    def _check_devices(self) -> None:
        """Raise ConfigError if a stage could not read pages on GPUs."""
        config = self.config
        actors = {"decode": config.decode.actor}
        if config.topology != "colocated":
            actors |= {"prefill": config.prefill.actor, "compressor": config.compressor.actor}
            if self.encode_workers and config.encode.worker == "own":
                actors["encode"] = config.encode.actor
        without = [name for name, actor in actors.items() if not actor.num_gpus]
        if config.pool.arena == "device" and without:
            raise ConfigError(
                f"pool.arena=device: {without[0]} has no GPU, and only GPUs access these pages: "
                f"set {without[0]}.actor.num_gpus, or pool.arena to 'host'"
            )

    def _check_floor(self) -> None:
        droppers = [offer.plugin for offer in self.offers if offer.on and offer.drops_tokens]
        if self.config.compressor.floor == "high" and droppers:
            raise ConfigError(
                f"compressor.floor=high: the plug-in {droppers[0]!r} of decode.plugins drops "
                "tokens; leave it out, or disable it"
            )

    def check_revision(self, loaded: str) -> None:
        """Raise ModelError if a worker has loaded another model than the application began with.

        Workers that start later read the same directory, and its files may have been replaced.
        """
        if loaded != self.revision:
            raise ModelError(
                f"{self.model_path}: its files changed since the application started (revision "
                f"{loaded}, expected {self.revision}): restart the application, or restore them"
            )

    def _check_stock(self) -> None:
        """Raise ConfigError if free lists and prefix cache leave too little for requests."""
        capacity, page = self.config.pool.kv_cache_memory_bytes, self.pages.page_bytes
        if 2 * (self.pool_pages * page - self._stock_bytes) < capacity:
            raise ConfigError(
                f"pool.extent_pages={self.config.pool.extent_pages}: {self.workers} workers may "
                f"keep twice as many pages of {page} bytes each, more than half of "
                f"pool.kv_cache_memory_bytes={capacity}{self._each}: lower the one or raise the "
                "other"
            )
        if 4 * self.bookable_bytes < capacity:
            raise ConfigError(
                f"pool.prefix_bytes={self.pages.prefix_bytes}: with the free lists of workers "
                f"{self._with_features}it "
                f"leaves {self.bookable_bytes} bytes of pool.kv_cache_memory_bytes={capacity}"
                f"{self._each} for requests, less than a quarter: lower it or raise the capacity"
            )

    @property
    def _with_features(self) -> str:
        if not self.encode_workers:
            return ""
        kept = self.config.encode.cache_bytes
        return f"and encode.cache_bytes={kept} of {self.encode_workers} workers "

    @property
    def _each(self) -> str:
        return f" in each of {self.shards} shards" if self.shards > 1 else ""

    @property
    def pool_address(self) -> str:
        return f"unix:{self.run_dir / self.named('pool')}.sock"

    @property
    def router_address(self) -> str:
        return self.address(self.named("router"))

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """Router addresses of all shards, in order."""
        return tuple(replace(self, shard=shard).router_address for shard in range(self.shards))

    @property
    def turns(self) -> Path:
        """Lock file with which the stages of this machine take turns on its cores."""
        return self.run_dir / "turns"

    def address(self, name: str) -> str:
        """The address of a process: its socket on one node, its name if there are several nodes."""
        return f"unix:{self.run_dir / name}.sock" if self.nodes == 1 else name


def new_name(role: str) -> str:
    """A unique process name."""
    return f"{role}-{secrets.token_hex(4)}"
