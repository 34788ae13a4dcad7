"""Which compiled kernels a server's methods call beside those that every method calls."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import page_format
from triptych.core.methods.table import policies_of
from triptych.core.policy import Policy
from triptych.core.profile import Profile

KernelNeed = Literal["steps_by_op", "merged_tokens", "whole_pages", "page_selection"]
"""``steps_by_op``: prefill computes some layers op by op, and not as one program;
``merged_tokens``: tokens of a prompt are merged; ``whole_pages``: tokens of a page are encoded
together; ``page_selection``: decode chooses the pages that it reads."""


def kernel_needs(config: AppConfig) -> frozenset[KernelNeed]:
    """Kinds of kernels for a CPU that the settings of a server call for, beside the usual ones.

    The model is not known yet: methods that need a file which the settings do not name, such as
    networks beside the model, are taken to merge tokens and to compute prompts op by op.
    """
    found = set(_needs_of_methods(config.compressor))
    if config.decode.selection.method != "none":
        found.add("page_selection")
    return frozenset(found)


def _needs_of_methods(config: CompressorConfig) -> frozenset[KernelNeed]:
    try:
        policies = policies_of(config, _named_profile(config))
    except ConfigError:
        return frozenset({"steps_by_op", "merged_tokens"})
    return _needs_of_policies(policies)


def _named_profile(config: CompressorConfig) -> Profile | None:
    """The profile whose file the settings name; None: they name none.

    Raises: ConfigError if the file is not a profile
    """
    return None if config.profile in ("auto", "none") else Profile.read(Path(config.profile))


def _needs_of_policies(policies: Collection[Policy]) -> frozenset[KernelNeed]:
    found = set[KernelNeed]()
    if any(map(_computes_by_op, policies)):
        found.add("steps_by_op")
    if any(policy.merges for policy in policies):
        found.add("merged_tokens")
    if any(page_format(policy.high_format).codes_whole_pages for policy in policies):
        found.add("whole_pages")
    return frozenset(found)


def _computes_by_op(policy: Policy) -> bool:
    """Whether a prefill step cannot be a program.

    A program rotates keys and values of all heads by one matrix, sums attention and no other
    statistics, and stores the same tokens in all layers.
    """
    how, rule = policy.kv_rotation, policy.observing_rule
    is_plain = how.has_rotated_keys and not how.bases and not how.pair_order
    has_statistics = rule is not None and not rule.adds_up_attention
    return not is_plain or has_statistics or policy.reads_in_blocks
