"""The compression policy, resolved: which formats hold a request's tokens, and by what rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from triptych.core.config import Auto, CompressorConfig, require
from triptych.core.images import IMAGE, TEXT, Modality
from triptych.core.layout import page_format
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.profile import Profile, Settings

T = TypeVar("T", str, int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRotation:
    """How keys and values are transformed before they are stored in pages.

    ``rotated``: an orthogonal matrix is applied after RoPE, so that no channel is an outlier;
    attention in rotated coordinates gives the same result. ``key_centre`` is subtracted from keys
    before that: little-endian fp16 [layers, kv_heads, head_dim], or empty. With ``bases`` vectors
    of each head are multiplied by a matrix of their own before that matrix, keys by the first and
    values by the second: int8 [2, layers, kv_heads, head_dim, head_dim] in steps of 1/127, whose
    nearest orthogonal matrices are meant. With ``pair_order`` the channels of keys of each head are
    put into that order instead, and those of a segment of ``block_gtq`` pages are mixed among
    themselves: uint8 [layers, kv_heads, head_dim / 2], RoPE pairs (channels c and c + head_dim / 2)
    from the most energy on. Values are in the Hadamard matrix's coordinates then too. Without
    ``rotates_keys`` only values are rotated.

    Source: QuaRot (Hadamard rotation of keys and values); OSCAR (bases of each head); the centre is
            ours (docs/log.md)
    """

    rotated: bool = False
    key_centre: bytes = b""
    bases: bytes = field(default=b"", repr=False)
    pair_order: bytes = field(default=b"", repr=False)
    rotates_keys: bool = field(default=True, repr=False)

    @property
    def has_rotated_keys(self) -> bool:
        """Whether stored keys are rotated."""
        return self.rotated and self.rotates_keys


Measured = Literal["attention", "retrieval_attention", "attention_moments", "query_statistics"]
"""What prefill measures of a prompt's queries for a retention rule: the sum of the attention that
each token receives from them, of all heads or of some; its mean and variance; or the mean and
covariance of the queries before RoPE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A rule by which tokens of a prompt are kept or dropped: a score and a budget.

    The sink and the recent window of the policy are always kept, and count towards the budget.
    """

    score: str
    """Name in ``kernels.retain.SCORES``."""
    budget: str
    """Name in ``kernels.retain.BUDGETS``."""
    keep_share: float
    """Share of the prompt's tokens that are kept, the mean over head rows."""
    last_queries: int | None = None
    """Queries of the prompt that are measured: the last so many, or all (0). None: none are."""
    measured: Measured = "attention"
    """What is measured of them."""
    head_shares: tuple[float, ...] = ()
    """Share of the tokens that each head row keeps, in the order of layers and KV heads, where
    calibration has found it; empty: the budget is not static."""
    layer_errors: tuple[float, ...] = ()
    """Error of the attention of each layer when it keeps few tokens, where calibration has found
    it; empty: no budget depends on it."""
    heads: tuple[tuple[int, ...], ...] = ()
    """Query heads of each layer whose attention is measured; empty: all."""
    compares_layers: bool = False
    """Whether the budget of a layer depends on what was measured in all layers."""
    while_generating: bool = False
    """Whether tokens are dropped during decode too, so that a head row keeps as many as of the
    prompt. Then the sums of prefill are the largest of a group of query heads, as those of
    decode."""

    @property
    def adds_up_attention(self) -> bool:
        """Whether what is measured is a sum of attention."""
        return self.measured in ("attention", "retrieval_attention")

    block_tokens: int = 0
    """Tokens of a block of a prompt that is read in bounded memory: tokens are dropped down to the
    budget after each block. 0: the rule is applied once, to the whole prompt."""
    most_kept: int = 0
    """Most tokens of a head row that are kept, the mean over head rows; 0: any number."""

    def most_tokens(self, prompt_tokens: int) -> int:
        """The tokens of a head row that are kept of a prompt, the mean over head rows."""
        share = round(self.keep_share * prompt_tokens)
        return min(share, self.most_kept) if self.most_kept else share


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMerging:
    """A rule by which neighbouring text tokens of a prompt become one, by their keys.

    In each head row the neighbours whose keys are most alike are joined, until it has its share of
    the prompt. The sink and the recent window are not merged, and count towards the share.
    """

    keep_share: float
    """Share of the prompt's text tokens that are left."""

    def sets(self, tokens: int, leaving: int, runs: int) -> int:
        """Tokens that ``leaving`` tokens become, the same number in each head row.

        ``tokens``: text tokens of the prompt; ``runs``: runs of consecutive ones among the leaving
        tokens, which are not joined with each other.

        >>> KeyMerging(keep_share=0.5).sets(tokens=100, leaving=60, runs=1)
        10
        >>> KeyMerging(keep_share=0.25).sets(tokens=100, leaving=60, runs=2)
        2
        """
        joins = tokens - round(self.keep_share * tokens)
        return max(runs, leaving - joins)


class Thresholds(NamedTuple):
    """By which output tokens are high, low or dropped; without any all of them are high."""

    alpha_high: float = 0.0
    alpha_low: float = 0.0
    mass_high: float = 0.0
    mass_low: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which format stores each token, and which tokens are dropped.

    The first ``sink_tokens`` and the newest ``window_tokens`` tokens stay in 8 bits, since they
    get most of the attention. The newest ``high_window_tokens`` are at least high. Of the others,
    a token among ``n`` is high if its mean attention from later tokens is at least
    ``alpha_high / n``, low if it is at least ``alpha_low / n``, and dropped otherwise. With
    ``mass_*`` the thresholds are shares instead: the least significant tokens that together
    receive less than that share of all attention are not high, or not low. While a request
    generates, that is the attention on the tokens that it stores. In a uniform policy all tokens
    are high.
    With ``retention`` its rule decides instead of thresholds: tokens that it keeps are high, and so
    are output tokens, of which it drops some if it is applied while generating.

    With a ``merger`` or ``key_merging``, tokens of text in a prompt that are neither sink nor
    window are merged, and have biases in place of scores. With ``images`` that policy decides about
    the tokens of images: its ``merger`` merges these.

    Source: DiffKV, section 4 (thresholds relative to the mean weight 1/n, a window of 64 high
            tokens). Sink and window with more bits are ours (docs/log.md)
    """

    name: str
    """The resolved name, such as ``uniform:k8v4``."""
    high_format: str
    low_format: str | None = None
    """None: there is no low class, and nothing is dropped."""
    alpha_high: float = 0.0
    alpha_low: float = 0.0
    mass_high: float = 0.0
    """LeanKV's thresholds, as shares of all attention; 0: the policy uses ``alpha_*``."""
    mass_low: float = 0.0
    alpha_scales: tuple[float, ...] = ()
    """What ``alpha_*`` are multiplied with in each head row, in the order of layers and KV heads;
    empty: 1 in all of them."""
    window_tokens: int = 64
    high_window_tokens: int = 64
    """Newest tokens that are at least high, whatever attention they receive."""
    sink_tokens: int = 1
    score_every: int = 0
    """Output tokens between two updates of the scores; 0: scores are not updated."""
    kv_rotation: KVRotation = KVRotation()
    merger: LearnedFile | None = None
    """The network that merges tokens; None: no network does."""
    key_merging: KeyMerging | None = None
    """The rule that merges tokens without a network; None: no rule does."""
    scorer: LearnedFile | None = None
    """The network that scores prompt tokens; None: their attention is summed, if it is needed."""
    retention: Retention | None = None
    """None: thresholds decide."""
    images: "Policy | None" = None
    """Decides which tokens of images are high, low or dropped, in the formats of this policy; None:
    they are treated as text is."""
    version: int = 1
    """Version of the method (``methods.composition``)."""

    def check(self) -> None:
        """Raise ConfigError if thresholds or formats are out of order."""
        window = self.window_tokens
        require(window >= 0, "compressor.recent_window_tokens", window, ">= 0")
        high, low = self.alpha_high, self.alpha_low
        require(high >= 0, "compressor.alpha_high", high, ">= 0")
        require(0 <= low <= high, "compressor.alpha_low", low, f"0 to alpha_high ({high})")
        if self.merger is not None or self.key_merging is not None:
            expected = f"a quantized format with {self.name}"
            require(self.is_quantized, "compressor.high_format", self.high_format, expected)
        for setting, name in (("high_format", self.high_format), ("low_format", self.low_format)):
            form = page_format(name or self.high_format)
            expected = f"a format without segments of keys, whose method is '{form.name}'"
            is_ordered = bool(self.kv_rotation.pair_order)
            require(is_ordered or not form.key_widths, f"compressor.{setting}", form.name, expected)
            expected = f"a format whose keys may be rotated with {self.name}"
            mixes = form.has_polar_keys and self.kv_rotation.has_rotated_keys
            require(not mixes, f"compressor.{setting}", form.name, expected)
        if self.low_format is None:
            return
        above, below = page_format(self.high_format), page_format(self.low_format)
        for setting, form in (("high_format", above), ("low_format", below)):
            expected = "a format whose tokens can move alone, since tokens change their class"
            require(not form.codes_whole_pages, f"compressor.{setting}", form.name, expected)
        fewer = below.key_bits <= above.key_bits and below.value_bits <= above.value_bits
        require(
            below != above and fewer,
            "compressor.low_format",
            below.name,
            f"a format with fewer bits than high_format ({above.name})",
        )

    @property
    def is_quantized(self) -> bool:
        """Whether no token stays in 16 bits. The sink and the recent window have the 8 or 16 bits
        of that."""
        return page_format(self.high_format).is_quantized

    @property
    def compresses(self) -> bool:
        """Whether some tokens have fewer than 16 bits."""
        return self.is_quantized or self.low_format is not None

    @property
    def answer_thresholds(self) -> Thresholds:
        """The thresholds of output tokens; without scores all of them are high."""
        if not self.score_every:
            return Thresholds()
        return Thresholds(self.alpha_high, self.alpha_low, self.mass_high, self.mass_low)

    @property
    def scores_tokens(self) -> bool:
        """Whether tokens of answers are scored while they are written."""
        return self.score_every > 0 and self.low_format is not None

    @property
    def evicts_output(self) -> bool:
        """Whether tokens are dropped while an answer is generated, by the attention they received.

        So that a head row keeps as many as of the prompt.
        """
        return self.retention is not None and self.retention.while_generating

    @property
    def merged_tokens(self) -> int:
        """Tokens of text in a prompt that become one; 1: none are merged."""
        return self.merger.chunk_tokens if self.merger else 1

    @property
    def mergers(self) -> Mapping[Modality, LearnedFile]:
        """The networks that merge tokens, by the modality of these; empty: none are merged."""
        of_images = self.images.merger if self.images else None
        files: dict[Modality, LearnedFile | None] = {TEXT: self.merger, IMAGE: of_images}
        return {modality: file for modality, file in files.items() if file is not None}

    @property
    def merges(self) -> bool:
        """Whether tokens of prompts are merged, by a network or a rule."""
        return bool(self.mergers) or self.key_merging is not None

    @property
    def observing_rule(self) -> Retention | None:
        """The retention rule for which prefill measures queries; None: there is none."""
        parts = (self,) if self.images is None else (self, self.images)
        rules = (part.retention for part in parts if part.retention is not None)
        return next((rule for rule in rules if rule.last_queries is not None), None)

    @property
    def reads_in_blocks(self) -> bool:
        """Whether tokens of a prompt are dropped while it is read, after each block of it."""
        return self.retention is not None and self.retention.block_tokens > 0

    @property
    def observes_attention(self) -> bool:
        """Whether prefill adds up the attention that tokens receive."""
        rule = self.observing_rule
        of_images = self.images is not None and self.images.observes_attention
        return (
            self.needs_attention_sums or of_images or (rule is not None and rule.adds_up_attention)
        )

    @property
    def measures_queries(self) -> bool:
        """Whether prefill measures the mean and covariance of queries before RoPE."""
        rule = self.observing_rule
        return rule is not None and rule.measured == "query_statistics"

    @property
    def compares_layers(self) -> bool:
        """Whether tokens of a layer are kept by what was measured in all layers. Then a prompt is
        compressed once all of its layers are computed."""
        parts = (self,) if self.images is None else (self, self.images)
        return any(part.retention is not None and part.retention.compares_layers for part in parts)

    @property
    def decides_by_whole_prompt(self) -> bool:
        """Whether the class of a token, or how it is merged, depends on the whole prompt or on
        what it stands for. Then no prefix of a prompt can be cached."""
        is_divided = self.images is not None or self.merges
        has_16_bits = self.compresses and not self.is_quantized
        return is_divided or has_16_bits or self.retention is not None

    @property
    def drops_tokens(self) -> bool:
        """Whether tokens of a prompt may be dropped."""
        return self.retention is not None or max(self.alpha_low, self.mass_low) > 0

    @property
    def classifies_tokens(self) -> bool:
        """Whether tokens are classified by the attention that they receive."""
        return self.low_format is not None and max(self.alpha_high, self.mass_high) > 0

    @property
    def needs_significance(self) -> bool:
        """Whether prompt tokens are classified or merged by the attention that they receive."""
        pools = self.merger is not None and self.merger.kind == "merger"
        return self.classifies_tokens or pools or self.key_merging is not None

    @property
    def needs_attention_sums(self) -> bool:
        """Whether prefill sums that attention; else a network predicts it, or nothing needs it."""
        return self.needs_significance and self.scorer is None


def two_classes(config: CompressorConfig, profile: Profile | None) -> Policy:
    """A policy with two formats and without thresholds: all tokens are high."""
    known = settings_of(profile)
    high = chosen(config.high_format, known.high_format).lower()
    low = chosen(config.low_format, known.low_format).lower()
    return Policy(
        name=config.policy,
        high_format=high,
        low_format=low,
        window_tokens=chosen(config.recent_window_tokens, known.recent_window_tokens),
        high_window_tokens=config.high_window_tokens,
        sink_tokens=config.sink_tokens,
        kv_rotation=kv_rotation_of(config, low, profile),
    )


def settings_of(profile: Profile | None) -> Settings:
    """Values of ``auto``: those of the profile, or the defaults."""
    return profile.settings if profile else Settings()


def alpha_scales_of(config: CompressorConfig, profile: Profile | None) -> tuple[float, ...]:
    """The scales of thresholds of a profile, unless the setting leaves them out."""
    return profile.alpha_scales if profile and config.head_alphas == "auto" else ()


def chosen(setting: T | Auto, otherwise: T) -> T:
    """The setting, or ``otherwise`` where it is ``auto``."""
    return otherwise if setting == "auto" else setting


def kv_rotation_of(config: CompressorConfig, form: str, profile: Profile | None) -> KVRotation:
    """Of tokens in a format: rotated unless the setting says otherwise; centred if the first token
    has 8 bits or more.

    The key of the first token is far from all others. Centring keys helps only if that key is not
    quantized to few bits (docs/log.md).
    """
    quantized = page_format(form).is_quantized
    if config.kv_rotation == "none" or (config.kv_rotation == "auto" and not quantized):
        return KVRotation()
    if profile is None or config.sink_tokens == 0 or not quantized:
        return KVRotation(rotated=True)
    return KVRotation(rotated=True, key_centre=profile.centre)
