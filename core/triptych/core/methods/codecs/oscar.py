"""``oscar``: 2-bit keys and values of a clipped range, in bases that are fitted to each head."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.codecs.rotation import check_rotated
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.parts import EVERY_TOKEN
from triptych.core.methods.uniform import one_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def oscar(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """K2V2 in the bases of the profile.

    Keys are in the axes of the second moment of queries, values in those of their own second
    moment weighted by the energy of their keys; the Hadamard matrix then mixes the axes. The paper
    permutes channels after that, which changes nothing with one range for each vector.

    Raises: ConfigError if the rotation is turned off
    """
    check_rotated(config, rotated=True)
    assert profile is not None  # the needs of METHOD were checked
    found = one_format(config, profile, "k2v2")
    return replace(found, kv_rotation=replace(found.kv_rotation, bases=profile.packed_bases))


METHOD = Method(
    name="oscar",
    idea="2-bit keys and values of a clipped range, in bases fitted to queries and values",
    paper="OSCAR",
    policy=oscar,
    budget=EVERY_TOKEN,
    basis=Part(
        role="basis",
        name="fitted_axes",
        granularity="head",
        needs=frozenset({"calibration", "bases"}),
        traits=frozenset({"mixes_channels"}),
    ),
    codec=Part(role="codec", name="clipped_range_per_token", granularity="token"),
)
"""The recent window stays in 8 bits instead of 16, as in all methods. Keys are centred, which the
paper does not do."""
