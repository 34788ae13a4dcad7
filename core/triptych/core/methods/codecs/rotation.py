"""Checks of ``compressor.kv_rotation`` for methods that prescribe whether numbers are rotated."""

from triptych.core.config import CompressorConfig
from triptych.core.errors import ConfigError


def check_rotated(config: CompressorConfig, *, rotated: bool) -> None:
    """Raise ConfigError if ``compressor.kv_rotation`` is the opposite of what a method needs."""
    refused = "none" if rotated else "hadamard"
    if config.kv_rotation == refused:
        why = "rotates keys and values" if rotated else "has scales of channels, without a rotation"
        raise ConfigError(
            f"compressor.kv_rotation={refused}: {config.policy!r} {why}: leave it at 'auto', or "
            "choose another method"
        )
