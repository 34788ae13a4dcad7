"""``uniform:<format>``: all tokens in one format."""

from triptych.core.config import CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import page_format
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import EVERY_TOKEN, HADAMARD, ONE_RANGE
from triptych.core.policy import Policy, chosen, kv_rotation_of, settings_of
from triptych.core.profile import Profile


def uniform(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """All tokens in one format, except the first and the newest."""
    high = config.policy.partition(":")[2].lower()
    form = page_format(high)
    if form.codes_whole_pages:
        raise ConfigError(
            f"compressor.policy={config.policy}: pages of {high} are encoded whole, by a method of "
            "their own: use 'kivi', 'kivi:2' or 'kvarn'"
        )
    if form.key_widths:
        raise ConfigError(
            f"compressor.policy={config.policy}: keys of {high} need channels that are ordered by "
            f"their energy, by a method of its own: use '{high}'"
        )
    if form.has_polar_keys:
        raise ConfigError(
            f"compressor.policy={config.policy}: pages of {high} need keys that are not rotated: "
            "use 'spherical'"
        )
    return one_format(config, profile, high)


def one_format(config: CompressorConfig, profile: Profile | None, high: str) -> Policy:
    """A policy with all tokens in the format ``high``, except the first and the newest."""
    return Policy(
        name=config.policy,
        high_format=high,
        window_tokens=chosen(
            config.recent_window_tokens, settings_of(profile).recent_window_tokens
        ),
        high_window_tokens=config.high_window_tokens,
        sink_tokens=config.sink_tokens,
        kv_rotation=kv_rotation_of(config, high, profile),
    )


METHOD = Method(
    name="uniform",
    idea="all tokens in one format",
    policy=uniform,
    budget=EVERY_TOKEN,
    basis=HADAMARD,
    codec=ONE_RANGE,
)
