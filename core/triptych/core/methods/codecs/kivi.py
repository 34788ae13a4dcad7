"""``kivi`` and ``kivi:2``: keys by channel and values by token, in 4 or 2 bits."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.codecs.rotation import check_rotated
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.parts import AS_COMPUTED, EVERY_TOKEN
from triptych.core.methods.uniform import one_format
from triptych.core.policy import KVRotation, Policy
from triptych.core.profile import Profile


def kivi4(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """4 bits; see ``METHOD``."""
    return _unrotated(config, profile, "kivi4")


def kivi2(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """2 bits; see ``METHOD``."""
    return _unrotated(config, profile, "kivi2")


def _unrotated(config: CompressorConfig, profile: Profile | None, high: str) -> Policy:
    """Raises: ConfigError if the rotation is turned on"""
    check_rotated(config, rotated=False)
    return replace(one_format(config, profile, high), kv_rotation=KVRotation())


CODEC = Part(
    role="codec",
    name="keys_by_channel",
    granularity="page",
    traits=frozenset({"codes_whole_pages", "codes_by_channel"}),
)
METHOD = Method(
    name="kivi",
    idea="4-bit keys by channel and values by token; the newest tokens in 8 bits",
    paper="KIVI",
    policy=kivi4,
    budget=EVERY_TOKEN,
    basis=AS_COMPUTED,
    codec=CODEC,
)
"""The tokens of a page are KIVI's group of keys (42 at head size 64, where the paper has 32), a
token and head the group of values. KIVI's residual is the recent window, in 8 instead of 16 bits.
"""
TWO_BITS = Method(
    name="kivi:2",
    idea="kivi with 2 bits",
    paper="KIVI",
    policy=kivi2,
    budget=EVERY_TOKEN,
    basis=AS_COMPUTED,
    codec=CODEC,
)
"""75 tokens are a page and so a group of keys."""
