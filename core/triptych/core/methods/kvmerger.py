"""``kvmerger``: neighbouring prompt tokens with alike keys become one token."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.learned import merged
from triptych.core.methods.parts import ATTENTION, EVERY_TOKEN, HADAMARD, ONE_RANGE
from triptych.core.policy import KeyMerging, Policy
from triptych.core.profile import Profile


def kvmerger(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Join the most alike neighbours until ``compressor.keep_share`` of the prompt is left.

    Source: KVMerger (merging sets, pivots, Gaussian kernel). The paper joins neighbours above a
            cosine of 0.75 to 0.8, which gives another number of tokens for each prompt; a share
            instead, and the logit bias of a merged token, are ours
    """
    rule = KeyMerging(keep_share=config.keep_share)
    return replace(merged(config, profile), key_merging=rule)


METHOD = Method(
    name="kvmerger",
    idea="neighbouring prompt tokens with alike keys become one, all in the high format",
    paper="KVMerger",
    policy=kvmerger,
    scorer=ATTENTION,
    budget=EVERY_TOKEN,
    merger=Part(
        role="merger",
        name="gaussian_kernel",
        granularity="head",
        traits=frozenset({"merges_tokens", "places_merged_tokens"}),
    ),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
