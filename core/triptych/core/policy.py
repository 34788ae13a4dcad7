"""The compression policy, resolved: which formats hold a request's tokens, and by what rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from triptych.core.config import Auto, CompressorConfig, require
from triptych.core.layout import page_format
from triptych.core.plugins import POLICY_NAMES
from triptych.core.profile import Profile, Settings
from triptych.core.registry import Registry

T = TypeVar("T", str, int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """In which coordinates pages hold keys and values.

    ``rotated``: after RoPE by an orthogonal matrix, so that no channel is an outlier; attention in
    rotated coordinates is the same. ``key_centre`` is subtracted from keys before: little-endian
    fp16 [layers, kv_heads, head_dim], or nothing.

    Source: QuaRot (Hadamard rotation of keys and values); the centre is ours (docs/log.md)
    """

    rotated: bool = False
    key_centre: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What becomes of each token.

    The first ``sink_tokens`` and the newest ``window_tokens`` stay in 16 bits, since most
    attention rests on them; the newest ``high_window_tokens`` are high at least. Of the others,
    those whose mean attention from later tokens reaches ``alpha_high / n`` of ``n`` tokens are
    high; from ``alpha_low / n`` on they are low; the rest is dropped. Or, with ``mass_*``, the
    least significant ones that together receive less than that share of all attention are not;
    then tokens of an answer stay high, since such shares say nothing of a single token. A uniform
    policy is the case in which all are high.

    Source: DiffKV, section 4 (thresholds relative to the mean weight 1/n, a window of 64 high
            tokens). Sink and window in 16 bits are ours (docs/log.md)
    """

    name: str
    """As resolved, such as ``uniform:k8v4``."""
    high_format: str
    low_format: str | None = None
    """None: there is no low class, and nothing is dropped."""
    alpha_high: float = 0.0
    alpha_low: float = 0.0
    mass_high: float = 0.0
    """LeanKV's thresholds, as shares of all attention; 0: the policy goes by ``alpha_*``."""
    mass_low: float = 0.0
    window_tokens: int = 64
    high_window_tokens: int = 64
    """Newest tokens that are high at least, whatever attention they receive."""
    sink_tokens: int = 1
    score_every: int = 0
    """Tokens of an answer from one update of the scores to the next; 0: nobody asks for them."""
    basis: Basis = Basis()

    @staticmethod
    def of(config: CompressorConfig, profile: Profile | None = None) -> "Policy":
        """Settings, with the profile's answer or a plain default where they say ``auto``.

        Raises: ConfigError if thresholds or formats are out of order
        """
        known = profile.settings if profile else Settings()
        name = known.policy if config.policy == "auto" else config.policy
        kind = "uniform" if name.startswith("uniform:") else name
        policy = COMPRESSION_POLICIES.load(kind)(replace(config, policy=name), profile)
        policy.check()
        return policy

    def check(self) -> None:
        """Raise ConfigError if thresholds or formats are out of order."""
        window = self.window_tokens
        require(window >= 0, "compressor.recent_window_tokens", window, ">= 0")
        high, low = self.alpha_high, self.alpha_low
        require(high >= 0, "compressor.alpha_high", high, ">= 0")
        require(0 <= low <= high, "compressor.alpha_low", low, f"0 to alpha_high ({high})")
        if self.low_format is None:
            return
        above, below = page_format(self.high_format), page_format(self.low_format)
        require(above.is_quantized, "compressor.high_format", above.name, "a quantized format")
        fewer = below.key_bits <= above.key_bits and below.value_bits <= above.value_bits
        require(
            below != above and fewer,
            "compressor.low_format",
            below.name,
            f"a format with fewer bits than high_format ({above.name})",
        )

    @property
    def answer_alphas(self) -> tuple[float, float]:
        """``alpha_high`` and ``alpha_low`` for tokens of an answer; without scores all are high."""
        return (self.alpha_high, self.alpha_low) if self.score_every else (0.0, 0.0)

    @property
    def needs_significance(self) -> bool:
        """Whether tokens are told apart by the attention that they receive."""
        return self.low_format is not None and max(self.alpha_high, self.mass_high) > 0


COMPRESSION_POLICIES: Registry[Callable[[CompressorConfig, Profile | None], Policy]] = Registry(
    kind=POLICY_NAMES.kind,
    builtin={
        "uniform": "triptych.core.policy:uniform",
        "diffkv": "triptych.core.policy:by_mean_attention",
        "leankv": "triptych.core.policy:by_share_of_attention",
    },
)
"""Functions that make a policy of the settings, with ``policy`` resolved, and of the profile."""


def uniform(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """``uniform:<format>``: all tokens in one format, but the first and the newest."""
    high = config.policy.partition(":")[2].lower()
    return Policy(
        name=config.policy,
        high_format=high,
        window_tokens=_chosen(config.recent_window_tokens, _known(profile).recent_window_tokens),
        high_window_tokens=config.high_window_tokens,
        sink_tokens=config.sink_tokens,
        basis=basis_of(config, high, profile),
    )


def by_mean_attention(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """High, low or dropped by the mean attention that a token receives from later ones.

    Source: DiffKV, section 4
    """
    known = _known(profile)
    alpha_high = _chosen(config.alpha_high, known.alpha_high)
    return replace(
        _two_classes(config, profile),
        alpha_high=alpha_high,
        alpha_low=_chosen(config.alpha_low, known.alpha_low),
        score_every=config.score_every_tokens if alpha_high > 0 else 0,
    )


def by_share_of_attention(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """High, low or dropped by the share of all attention that the least significant receive.

    Source: LeanKV, section 4.2
    """
    classes = _two_classes(config, profile)
    return replace(classes, mass_high=config.mass_high, mass_low=config.mass_low)


def _two_classes(config: CompressorConfig, profile: Profile | None) -> Policy:
    """Two formats and no thresholds yet: all tokens are high."""
    known = _known(profile)
    high = _chosen(config.high_format, known.high_format).lower()
    return Policy(
        name=config.policy,
        high_format=high,
        low_format=_chosen(config.low_format, known.low_format).lower(),
        window_tokens=_chosen(config.recent_window_tokens, known.recent_window_tokens),
        high_window_tokens=config.high_window_tokens,
        sink_tokens=config.sink_tokens,
        basis=basis_of(config, high, profile),
    )


def _known(profile: Profile | None) -> Settings:
    return profile.settings if profile else Settings()


def _chosen(setting: T | Auto, otherwise: T) -> T:
    return otherwise if setting == "auto" else setting


def basis_of(config: CompressorConfig, high_format: str, profile: Profile | None) -> Basis:
    """Rotated unless told otherwise; centred if a first token in 16 bits allows for it.

    The key of the first token lies far from all others, where they are not: centred keys help only
    if that one is not rounded (docs/log.md).
    """
    quantized = page_format(high_format).is_quantized
    if config.basis == "plain" or (config.basis == "auto" and not quantized):
        return Basis()
    if profile is None or config.sink_tokens == 0 or not quantized:
        return Basis(rotated=True)
    return Basis(rotated=True, key_centre=profile.centre)
