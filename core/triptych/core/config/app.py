"""All settings of an application."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, cast

from triptych.core.config.experimental import ExperimentalConfig
from triptych.core.config.ingress import IngressConfig
from triptych.core.config.machine import pool_bytes
from triptych.core.config.model import ModelConfig
from triptych.core.config.network import NetworkConfig
from triptych.core.config.pool import PoolConfig
from triptych.core.config.renamed import warn_of_old_names, with_new_names
from triptych.core.config.router import RouterConfig
from triptych.core.config.stages import (
    ActorConfig,
    AutoscalingConfig,
    CompressorConfig,
    DecodeConfig,
    EncodeConfig,
    PrefillConfig,
)
from triptych.core.config.values import require, with_sizes
from triptych.core.errors import ConfigError
from triptych.core.schema import SchemaError, build

Topology = Literal["auto", "disaggregated", "colocated"]
FEW_CORES = 1
"""On so many cores stages take turns in any case, and processes of their own have more memory and
more messages for it. On two, prompts and answers are computed at the same time."""


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

    topology: Topology = "disaggregated"
    """``disaggregated``: an actor per stage; ``colocated``: the same engines in one process;
    ``auto``: colocated where it is faster, on a single core, unless a stage before decode has
    settings of its actors, autoscaling or a GPU."""

    node_resource: str = ""
    """A custom Ray resource: every actor of this application runs on nodes that have it. Empty: on
    all nodes. If there are several, each has a pool of its own."""

    min_nodes: int = 1
    """How many nodes to wait for before the application starts. If there are several by then, it
    uses those that join later too; if there is one, it keeps to that."""

    encode: EncodeConfig = field(default_factory=EncodeConfig)
    """The encode stage; only models that read images have it."""

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

    experimental: ExperimentalConfig = field(default_factory=ExperimentalConfig)
    """Settings for experiments."""

    def __post_init__(self) -> None:
        require(self.min_nodes >= 1, "min_nodes", self.min_nodes, ">= 1")
        fits = self.router.roles == "both" or self.topology != "disaggregated"
        expected = "'both', or topology: colocated (other workers have the role of their stage)"
        require(fits, "router.roles", self.router.roles, expected)
        on_gpus = [name for name, group in self.worker_groups().items() if group.actor.num_gpus]
        fits = not self.pool.arena_path or not on_gpus
        expected = f"empty while num_gpus > 0 ({', '.join(on_gpus)}): a GPU cannot read a disk"
        require(fits, "pool.arena_path", self.pool.arena_path, expected)
        for stage, (actor, scaling) in self._deployed.items():
            self._check_shards(f"{stage}.actor.num_replicas", actor.num_replicas)
            if scaling.is_on:
                self._check_shards(f"{stage}.autoscaling.min_replicas", scaling.min_replicas)
                self._check_shards(f"{stage}.autoscaling.max_replicas", scaling.max_replicas)

    def on_machine(self, cores: int) -> "AppConfig":
        """These settings with the topology that ``auto`` stands for on so many cores.

        Raises: ConfigError if that topology does not fit the other settings
        """
        if self.topology != "auto":
            return self
        default = AppConfig()
        is_plain = all(
            (mine.actor, mine.autoscaling) == (usual.actor, usual.autoscaling)
            for mine, usual in (
                (self.encode, default.encode),
                (self.prefill, default.prefill),
                (self.compressor, default.compressor),
            )
        )
        is_small = cores <= FEW_CORES and not self.decode.actor.num_gpus
        return replace(self, topology="colocated" if is_plain and is_small else "disaggregated")

    @property
    def _deployed(self) -> dict[str, tuple[ActorConfig, AutoscalingConfig]]:
        """Stages whose settings say how many workers there are."""
        decode = {"decode": (self.decode.actor, self.decode.autoscaling)}
        if self.topology == "colocated":
            return decode
        encode = {"encode": (self.encode.actor, self.encode.autoscaling)}
        return {
            **(encode if self.encode.worker == "own" and self.encode.autoscaling.is_on else {}),
            "prefill": (self.prefill.actor, self.prefill.autoscaling),
            "compressor": (self.compressor.actor, self.compressor.autoscaling),
            **decode,
        }

    def _check_shards(self, name: str, count: int) -> None:
        """Raise ConfigError unless all shards get the same number of workers."""
        shards = self.router.shards
        expected = f"a multiple of router.shards ({shards}), since each shard has its own workers"
        require(count % shards == 0, name, count, expected)

    @property
    def arithmetic(self) -> str:
        """Data type and quantization: with the checkpoint, they determine all results."""
        return f"{self.model.arithmetic}, prompts {self.prefill.quantization}"

    def worker_groups(self) -> dict[str, WorkerGroup]:
        """Groups of workers that Ray starts: one per stage, or a single one sized by ``decode``."""
        stages = {"prefill": self.prefill, "compressor": self.compressor, "decode": self.decode}
        if self.topology == "colocated":
            stages = {"decode": self.decode}
        return {
            name: WorkerGroup(stage.actor, stage.autoscaling.most(stage.actor))
            for name, stage in stages.items()
        }

    def autoscaling(
        self, stage: Literal["encode", "prefill", "compress", "decode"]
    ) -> AutoscalingConfig:
        """When a stage gets more copies."""
        by_stage = {
            "encode": self.encode.autoscaling,
            "prefill": self.prefill.autoscaling,
            "compress": self.compressor.autoscaling,
            "decode": self.decode.autoscaling,
        }
        return by_stage[stage]

    def context_tokens(self, trained_tokens: int) -> int:
        """Tokens that the model attends to at once: its own context, or less if asked for."""
        asked = (self.model.max_model_len, self.experimental.context_window_tokens)
        return min([trained_tokens, *(tokens for tokens in asked if tokens != "auto")])

    @classmethod
    def from_mapping(cls, data: Mapping[str, object]) -> Self:
        """Build from parsed YAML; names of the release before are accepted, with a warning.

        Raises: ConfigError naming the key, the value and what was expected
        """
        settings, notes = with_new_names(data)
        warn_of_old_names(notes)
        settings = _measured(with_sizes(settings))
        try:
            return build(cls, settings)
        except SchemaError as error:
            raise ConfigError(str(error)) from error


def _measured(data: dict[str, object]) -> dict[str, object]:
    """The same settings with ``pool.kv_cache_memory_bytes: auto`` as a number."""
    pool = data.get("pool")
    if not isinstance(pool, dict):
        return data
    given = cast("dict[str, Any]", pool)
    if given.get("kv_cache_memory_bytes") != "auto":
        return data
    measured = pool_bytes(str(given.get("arena_path") or ""))
    return data | {"pool": given | {"kv_cache_memory_bytes": measured}}
