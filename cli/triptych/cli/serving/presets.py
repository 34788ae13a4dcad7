"""Settings under one name: what a paper compares with, served by one option.

Source: TinyServe, section 5 (its six baselines, with thresholds and share of pages as printed; its
        budgets in tokens, 2,048 of StreamingLLM and 512 of PyramidKV, are the share here that
        TinyServe reads, so that all have the same budget at any length)
"""

from collections.abc import Mapping, Sequence

from triptych.core.errors import ConfigError

SHARE = 0.3
"""Share of the pages that TinyServe reads, and of the tokens that others keep."""

PRESETS: Mapping[str, Sequence[str]] = {
    "tinyserve": (
        "compressor.policy=uniform:fp16",
        "decode.selection.method=box",
        f"decode.selection.keep_fraction={SHARE}",
        "decode.selection.budget_tokens=0",
    ),
    "tinyserve:full_cache": ("compressor.policy=uniform:fp16",),
    **{
        f"tinyserve:{name}": (
            f"compressor.policy={name}",
            f"compressor.keep_share={SHARE}",
            "compressor.high_format=k8v8",
        )
        for name in ("streaming_llm", "snapkv", "pyramidkv")
    },
    "tinyserve:soft_prune": (
        "compressor.policy=diffkv",
        "compressor.high_format=k8v8",
        "decode.plugins=[{name: soft_prune, options: {threshold: 0.1}}]",
    ),
    "tinyserve:entropy_stop": (
        "compressor.policy=uniform:fp16",
        "decode.plugins=[{name: entropy_stop, options: {threshold: 0.5}}]",
    ),
}
"""By name: settings as ``KEY=VALUE``. ``tinyserve`` is the method itself, the others its six
baselines. 16-bit pages cannot have tokens dropped, so what drops tokens stores them in 8 bits."""


def settings_of(preset: str | None) -> Sequence[str]:
    """The settings of a preset; none without one.

    Raises: ConfigError naming the presets that there are
    """
    if preset is None:
        return ()
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[preset]
