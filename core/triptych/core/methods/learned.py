"""``learned:*``: methods whose merger or scorer is a trained network.

Source: FastCache, section 3.2 (networks that make one token of k consecutive ones)
"""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.diffkv import by_mean_attention
from triptych.core.methods.parts import (
    ATTENTION,
    EVERY_TOKEN,
    HADAMARD,
    ONE_RANGE,
    classes_by_threshold,
    merger,
)
from triptych.core.methods.uniform import uniform
from triptych.core.policy import Policy, chosen, settings_of
from triptych.core.profile import Profile


def merged(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """All tokens in the high format; those of a prompt that leave the window are merged first.

    No token of the high window is merged, so the window is as long.
    """
    high = chosen(config.high_format, settings_of(profile).high_format)
    found = uniform(replace(config, policy=f"uniform:{high}"), profile)
    window = max(found.window_tokens, config.high_window_tokens)
    return replace(found, name=config.policy, window_tokens=window)


MERGE = Method(
    name="learned:merge",
    idea="k prompt tokens become one by attention and a network, all in the high format",
    paper="FastCache, KVMerger",
    policy=merged,
    scorer=ATTENTION,
    budget=EVERY_TOKEN,
    merger=merger("gated_pooling", "merger"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
PAPER = Method(
    name="learned:paper",
    idea="k prompt tokens become one by FastCache's plain networks, without attention",
    paper="FastCache",
    policy=merged,
    budget=EVERY_TOKEN,
    merger=merger("plain_networks", "paper_merger"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
SCORE = Method(
    name="learned:score",
    idea="`diffkv` with the attention of prompt tokens predicted from their keys and values",
    paper="DiffKV",
    policy=by_mean_attention,
    scorer=Part(
        role="scorer",
        name="predicted_attention",
        granularity="token",
        needs=frozenset({"training"}),
        network="scorer",
    ),
    budget=classes_by_threshold("thresholds_of_the_mean"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
