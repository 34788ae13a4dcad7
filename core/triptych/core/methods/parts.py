"""Parts that several methods are made of."""

from triptych.core.methods.composition import Part, Trait
from triptych.core.methods.learned_files import NetworkKind

ATTENTION = Part(
    role="scorer",
    name="received_attention",
    granularity="token",
    needs=frozenset({"attention_sums"}),
)
"""The attention that a token receives from itself and all later tokens."""
EVERY_TOKEN = Part(role="budget", name="every_token", granularity="model")
"""All tokens are in one class."""


def classes_by_threshold(name: str) -> Part:
    """A budget that keeps each token high, low or not at all, by thresholds of its score."""
    traits: frozenset[Trait] = frozenset({"drops_tokens", "requantizes_tokens"})
    return Part(role="budget", name=name, granularity="token", traits=traits)


def merger(name: str, network: NetworkKind) -> Part:
    """A merger of k consecutive tokens of a prompt, which takes the position of the newest."""
    return Part(
        role="merger",
        name=name,
        granularity="token",
        needs=frozenset({"training"}),
        traits=frozenset({"merges_tokens", "places_merged_tokens"}),
        network=network,
    )


HADAMARD = Part(
    role="basis", name="hadamard", granularity="model", traits=frozenset({"mixes_channels"})
)
"""A Hadamard rotation of keys and values after RoPE, around the mean key of a profile."""
AS_COMPUTED = Part(role="basis", name="as_computed", granularity="model")
"""Keys after RoPE and values as the model computes them."""
ONE_RANGE = Part(role="codec", name="one_range_per_token", granularity="token")
"""A scale and a zero for each token and head, in unified pages; or 16 bits."""
