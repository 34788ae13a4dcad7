"""``spherical``: keys as radius and angle of pairs, in tiers by rate and distortion."""

from triptych.core.config import CompressorConfig, require
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, scorer
from triptych.core.policy import KVRotation, Policy, Retention, chosen, kv_rotation_of, settings_of
from triptych.core.profile import Profile

HIGH, LOW = "r3a5v4", "r3a5v2"
"""The tiers: the same codes of keys, with values of 4 and of 2 bits."""


def spherical(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Each prompt token high, low or dropped, with the least distortion in a budget of bytes.

    The budget is ``compressor.keep_share`` of the bytes that a prompt takes with all tokens high.
    A token weighs as much as the last queries attend to it, as with ``snapkv``; of the attention
    from all queries, which old tokens receive more of, the KL is far larger (docs/log.md). Output
    tokens are high. Keys are centred if there is a profile, and not rotated, since a
    rotation would mix the channels of a pair; values are rotated.

    Raises: ConfigError if the rotation of keys is turned on
    """
    require(
        config.kv_rotation != "hadamard",
        "compressor.kv_rotation",
        config.kv_rotation,
        f"'auto' or 'none' with {config.policy!r}, whose codes are of the pairs of channels that "
        "RoPE rotates",
    )
    rule = Retention(
        score="window_attention",
        budget="rate_and_distortion",
        keep_share=config.keep_share,
        last_queries=WINDOW_QUERIES,
    )
    known = settings_of(profile)
    found = kv_rotation_of(config, HIGH, profile)
    rotation = KVRotation(
        rotated=found.rotated, key_centre=found.key_centre, rotates_keys=not found.rotated
    )
    return Policy(
        name=config.policy,
        high_format=HIGH,
        low_format=LOW,
        window_tokens=chosen(config.recent_window_tokens, known.recent_window_tokens),
        high_window_tokens=0,
        sink_tokens=config.sink_tokens,
        kv_rotation=rotation,
        retention=rule,
    )


METHOD = Method(
    name="spherical",
    idea="radius and angle of the pairs of keys, tokens in tiers by rate and distortion",
    paper="Spherical KV",
    policy=spherical,
    scorer=scorer("window_attention", "queries"),
    budget=Part(
        role="budget",
        name="rate_and_distortion",
        granularity="layer",
        traits=frozenset({"drops_tokens", "requantizes_tokens"}),
    ),
    basis=Part(role="basis", name="rotated_values", granularity="model"),
    codec=Part(
        role="codec", name="polar_keys", granularity="token", traits=frozenset({"codes_pairs"})
    ),
)
"""A pair has 8 bits: 3 of the radius and 5 of the angle. The recent window stays in 8 bits, as in
all methods. Keys are centred, which the paper does not do."""
