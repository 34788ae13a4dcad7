"""Methods with a part for images, ``<text method>/<image method>``: ``uniform:k8v4/snapkv``.

Both parts store tokens in the formats of one request, which are those of its method: the text
method's high format, and one format below it.
"""

from dataclasses import replace

from triptych.core.errors import ConfigError
from triptych.core.policy import Policy


def by_modality(name: str, text: Policy, images: Policy) -> Policy:
    """The policy that treats text by one policy and image tokens by another.

    Raises: ConfigError naming what the two cannot share
    """
    for policy, of in ((text, "text"), (images, "images")):
        if policy.reads_in_blocks:
            _refuse(
                name,
                f"{policy.name!r} drops tokens while a prompt is read, text and images alike: name "
                "it alone",
            )
        if not policy.is_quantized:
            _refuse(
                name, f"16-bit pages of prefill are not compressed ({of}): name a quantized one"
            )
    for policy in (text, images):
        if policy.key_merging is not None:
            _refuse(
                name,
                f"{policy.name!r} merges text by a share of its own, and keeps the tokens of "
                "images as they are: name it alone",
            )
    if text.merger is not None or images.merger is not None:
        _check_beside_merged(name, text, images)
    if text.kv_rotation != images.kv_rotation:
        _refuse(name, "the two store keys in different coordinates (compressor.kv_rotation)")
    read = [_scores_of(policy) for policy in (text, images) if _reads_scores(policy)]
    if len(read) == 2 and read[0] != read[1]:
        _refuse(
            name,
            "a token has one score: attention from all queries, from the last ones of the prompt, "
            "its moments, expected or predicted; name two methods that need the same, or one that "
            "needs none",
        )
    low = text.low_format or images.low_format
    if images.high_format != text.high_format:
        low = low or images.high_format
    formats = [text.high_format, low]
    for form in (images.high_format, images.low_format):
        if form is not None and form not in formats:
            _refuse(
                name,
                f"images in {form}, and text in {' and '.join(filter(None, formats))}: a request "
                "has two formats; set compressor.high_format or compressor.low_format to it",
            )
    if not images.classifies_tokens:
        images = replace(images, high_window_tokens=0)
    return replace(
        text, name=name, low_format=low, images=images, scorer=text.scorer or images.scorer
    )


def _check_beside_merged(name: str, text: Policy, images: Policy) -> None:
    """Raise ConfigError unless all tokens that are not merged are kept in one format."""
    for policy, of in ((text, "text"), (images, "images")):
        if policy.merger is None and (policy.drops_tokens or policy.low_format is not None):
            _refuse(
                name,
                f"merged tokens have a logit bias in the place of their score, so no token beside "
                f"them is dropped or classified ({of}): name a uniform method",
            )
    if images.high_format != text.high_format:
        _refuse(
            name,
            f"images in {images.high_format}, and text in {text.high_format}: merged tokens and "
            "those beside them are in the same format; set compressor.high_format to it",
        )


def _reads_scores(policy: Policy) -> bool:
    return policy.needs_significance or policy.observing_rule is not None


def _scores_of(policy: Policy) -> tuple[object, ...]:
    """The source of a policy's token scores: a network, or the queries whose attention counts."""
    rule = policy.observing_rule
    measured = rule and (rule.last_queries, rule.measured, rule.while_generating)
    return (policy.scorer, measured)


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"compressor.methods: {name!r}: {reason}")
