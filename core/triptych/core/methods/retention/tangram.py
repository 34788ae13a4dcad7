"""``tangram``: as snapkv, with a budget of each head row that calibration has found."""

from triptych.core.config import CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.head_budgets import head_shares
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def tangram(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep tokens as SnapKV, of each head row as many as the profile's head budgets say.

    Raises: ConfigError if the profile has none
    """
    codes = profile.head_budget_codes if profile else b""
    if not codes:
        raise ConfigError(
            "method 'tangram' needs head budgets, which the profile does not have: "
            "run 'triptych spread' for this model"
        )
    return kept_share(
        config,
        profile,
        score="window_attention",
        budget="by_calibration",
        last_queries=WINDOW_QUERIES,
        head_shares=head_shares(codes, config.keep_share),
    )


METHOD = Method(
    name="tangram",
    idea="as snapkv, with a budget of each head that calibration has found",
    paper="Tangram",
    policy=tangram,
    scorer=scorer("window_attention", "queries"),
    budget=best("head", "calibration"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
