"""The table of compression policies."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from triptych.core.registry import Registry

if TYPE_CHECKING:
    from triptych.core.config import CompressorConfig
    from triptych.core.policy import Policy
    from triptych.core.profile import Profile

COMPRESSION_POLICIES: "Registry[Callable[[CompressorConfig, Profile | None], Policy]]" = Registry(
    kind="compression_policies",
    builtin={
        "uniform": "triptych.core.policy:uniform",
        "diffkv": "triptych.core.policy:by_mean_attention",
        "leankv": "triptych.core.policy:by_share_of_attention",
    },
)
"""Settings, with ``policy`` resolved, and what calibration found for the model, to a policy."""
