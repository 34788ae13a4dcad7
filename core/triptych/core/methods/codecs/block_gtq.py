"""``block_gtq``: 2-bit values, and keys whose RoPE pairs have 4, 2 or 1 bits by their energy."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.codecs.rotation import check_rotated
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.parts import EVERY_TOKEN
from triptych.core.methods.uniform import one_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def block_gtq(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keys of 2 bits in the mean, in the order of pairs of the profile.

    The quarter of the pairs of a head with the most energy has 4 bits, the next quarter 2, and the
    others 1. Each of these segments is rotated alone, and has a norm. So all heads have segments of
    the same sizes, and their keys take the same bytes. The paper gives each bit where the error
    falls most, one head apart from another, from 1 to 8 bits a pair.

    Raises: ConfigError if the rotation is turned off
    """
    check_rotated(config, rotated=True)
    assert profile is not None  # the needs of METHOD were checked
    found = one_format(config, profile, "block_gtq")
    return replace(found, kv_rotation=replace(found.kv_rotation, pair_order=profile.packed_pairs))


METHOD = Method(
    name="block_gtq",
    idea="2-bit values and keys, with 4, 2 or 1 bits for RoPE pairs by their energy",
    paper="Block-GTQ",
    policy=block_gtq,
    budget=EVERY_TOKEN,
    basis=Part(
        role="basis",
        name="pairs_by_energy",
        granularity="head",
        needs=frozenset({"calibration", "pair_order"}),
        traits=frozenset({"mixes_segments"}),
    ),
    codec=Part(
        role="codec",
        name="levels_by_norm",
        granularity="token",
        traits=frozenset({"bits_by_energy", "scale_normalized"}),
    ),
)
"""The recent window stays in 8 bits instead of 16, as in all methods. Keys are centred, which the
paper does not do, and levels are equally spaced, not those of Lloyd and Max."""
