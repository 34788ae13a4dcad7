"""Settings of every component: frozen dataclasses, one owner per value, units in names."""

from triptych.core.config.app import AppConfig, WorkerGroup
from triptych.core.config.experimental import ExperimentalConfig
from triptych.core.config.ingress import IngressConfig
from triptych.core.config.model import DType, ModelConfig, Quantization
from triptych.core.config.network import NetworkConfig
from triptych.core.config.pool import PoolConfig
from triptych.core.config.request_limits import ImageLimitsConfig, RequestLimitsConfig
from triptych.core.config.router import RouterConfig
from triptych.core.config.stages import (
    ActorConfig,
    AutoscalingConfig,
    CompressorConfig,
    DecodeConfig,
    EncodeConfig,
    PrefillConfig,
    PromptQuantization,
    check_policy,
)
from triptych.core.config.steps import SelectionConfig, StepPluginConfig
from triptych.core.config.values import GIB, HOST, MIB, Auto, is_host, parse_bytes, require

__all__ = [
    "GIB",
    "HOST",
    "MIB",
    "ActorConfig",
    "AppConfig",
    "Auto",
    "AutoscalingConfig",
    "CompressorConfig",
    "DType",
    "DecodeConfig",
    "EncodeConfig",
    "ExperimentalConfig",
    "ImageLimitsConfig",
    "IngressConfig",
    "ModelConfig",
    "NetworkConfig",
    "PoolConfig",
    "PrefillConfig",
    "PromptQuantization",
    "Quantization",
    "RequestLimitsConfig",
    "RouterConfig",
    "SelectionConfig",
    "StepPluginConfig",
    "WorkerGroup",
    "check_policy",
    "is_host",
    "parse_bytes",
    "require",
]
