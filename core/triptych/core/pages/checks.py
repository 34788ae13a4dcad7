"""Refuses settings for which a page plan cannot work, with what to set instead."""

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import page_format
from triptych.core.pages.sliding_windows import SlidingWindows
from triptych.core.policy import Policy


def check_formats(plan: SlidingWindows) -> None:
    """Raise ConfigError when a page is too small for one token of a format in use."""
    for name in ("fp16", plan.policy.high_format, plan.policy.low_format):
        if name is not None:
            plan.layout_of(name)
    if plan.geometry.has_latents:
        check_latents(plan)
    if plan.codes_whole_pages and (not plan.high.tokens or plan.high.tokens % plan.recent.tokens):
        raise ConfigError(
            f"pool.page_bytes={plan.page_bytes}: {plan.policy.name!r} encodes "
            f"{plan.high.tokens} tokens at a time, and small pages hold {plan.recent.tokens}: "
            "use a size with small pages of 3 tokens, such as 'auto'"
        )
    if plan.policy.key_merging is not None and any(plan.geometry.windows):
        raise ConfigError(
            f"compressor.policy={plan.policy.name}: layers of this model have a sliding "
            "window, and some members of a merged token may be older than it: use a method "
            "that merges no tokens, such as 'snapkv'"
        )
    for file in plan.policy.mergers.values():
        if file.chunk_tokens > plan.retire_tokens:
            raise ConfigError(
                f"compressor.learned: {file.path!r} merges {file.chunk_tokens} tokens; at most "
                f"{plan.retire_tokens} with pool.page_bytes={plan.page_bytes}"
            )


def check_capacity(plan: SlidingWindows, capacity_bytes: int) -> None:
    """Raise ConfigError when the pool cannot hold even one short request."""
    least = 4 * plan.geometry.head_rows * plan.page_bytes
    if capacity_bytes < least:
        raise ConfigError(
            f"pool.kv_cache_memory_bytes: {capacity_bytes} bytes are left for requests beside "
            f"pool.prefix_bytes={plan.prefix_bytes}; this model needs at least {least} bytes "
            f"(four pages of {plan.page_bytes} bytes for each of {plan.geometry.head_rows} "
            "layers x KV heads)"
        )


def check_blocks(plan: SlidingWindows) -> None:
    """Raise ConfigError for models whose layers drop tokens of a prompt by another rule."""
    if plan.reads_in_blocks and plan.has_windows:
        raise ConfigError(
            f"compressor: {plan.policy.name!r} drops tokens of each layer while a prompt is read, "
            "and this model has layers with a sliding window, whose tokens are dropped by their "
            "positions: choose another method, such as 'snapkv'"
        )


def check_latents(plan: SlidingWindows) -> None:
    """Raise ConfigError for methods that treat keys and values of a token in different ways."""
    policy = plan.policy
    parts = (policy,) if policy.images is None else (policy, policy.images)
    if policy.key_merging is not None:
        raise ConfigError(
            f"compressor.policy={policy.name}: this model stores latents, which have no keys of "
            "heads to compare: use a method that merges no tokens, such as 'uniform:k4v4'"
        )
    if any(part.merger or part.scorer for part in parts):
        raise ConfigError(
            f"compressor.policy={policy.name}: this model stores latents, which are keys and "
            "values at once, and learned networks read and merge these apart: use a method "
            "without them"
        )
    if plan.low is not None and plan.low.format == plan.high.format:
        raise ConfigError(
            f"compressor.low_format={policy.low_format}: this model stores latents, whose format "
            f"is then {plan.low.format.name}, as with high_format={policy.high_format}: use one "
            "with fewer bits, such as 'k4v2'"
        )


def check_selection(config: AppConfig, policy: Policy) -> None:
    """Raise ConfigError if pages would be ranked whose summaries are not like their logits.

    Summaries are of keys alone, without biases, and are made of pages whose keys are read token by
    token.
    """
    how = config.decode.selection.method
    high = page_format(policy.high_format)
    if high.codes_whole_pages and how != "none":
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method={how}: pages of "
            f"{high.name} have no summaries; serve the method without selection"
        )
    if how == "a2ats" and (policy.kv_rotation.bases or policy.kv_rotation.pair_order):
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method=a2ats: codes are of "
            "keys before RoPE, and coordinates of each head mix what RoPE turns; use 'moments' or "
            "'box'"
        )
    if policy.merges and how != "none":
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method={how}: selection "
            "ranks pages by their keys, and merged tokens have biases beside them; serve the "
            "method without selection"
        )
