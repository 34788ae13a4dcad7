"""Parses method names from the command line into methods."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import yaml

from triptych.core.config import AppConfig, DType, ModelConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.table import policy_of
from triptych.evals.data.cases import EqualBytes, Method
from triptych.evals.methods.baselines import Baselines, is_baseline
from triptych.evals.methods.full_cache import FullCache, SimulatedFormat, simulated_format
from triptych.evals.methods.served_engines import EngineMethod

FULL, DEFAULT, SIMULATED, SELECTION = "full", "default", "simulated:", "selection."
SERVED = "served:"
"""In front of a method of the server whose name is that of a baseline too."""
CACHE = "+prefix_cache=true"

COMPARED = (
    DEFAULT,
    "leankv",
    "diffkv+alpha_high=1+recent_window_tokens=64+kv_rotation=none",
    "uniform:k8v8+kv_rotation=none",
    "uniform:k8v4+kv_rotation=none",
    "uniform:k4v4+kv_rotation=none",
    "uniform:k4v2+kv_rotation=none",
    "simulated:k4v8",
    "simulated:k2v4",
)
"""What ``triptych eval quality`` compares unless told otherwise."""


def parse_method(name: str, model_path: Path, base: AppConfig, dtype: DType) -> Method:
    """The method that a name stands for.

    ``full``, ``default`` (the settings of ``base``), ``simulated:<format>``, or a policy of
    the compressor with settings after it: ``uniform:k8v4+recent_window_tokens=128``, or
    ``default+selection.method=moments`` for those of ``decode.selection``. With
    ``+prefix_cache=true`` the server has its prefix cache, as by default, and so rounds prompts;
    the cases share nothing. ``served:snapkv+keep_share=0.5`` is the method of the server, and
    ``snapkv+keep=0.5`` the baseline of this name.

    Raises: ConfigError if the name or a setting is unknown
    """
    if name == FULL:
        return FullCache(model_path)
    if name.startswith(SIMULATED):
        form = simulated_format(name.removeprefix(SIMULATED))
        window = policy_of(base.compressor).window_tokens
        return SimulatedFormat(model_path, form, window)
    settings, has_cache = name.removeprefix(SERVED).removesuffix(CACHE), name.endswith(CACHE)
    config = base if settings == DEFAULT else _with_settings(settings, base)
    model = ModelConfig(name=str(model_path), dtype=dtype)
    return EngineMethod(name, replace(config, model=model), model_path, has_cache)


def parse_methods(
    names: Sequence[str], model_path: Path, base: AppConfig, dtype: DType
) -> list[Method | EqualBytes]:
    """Methods in the order of their names; a name that comes twice counts once.

    Baselines (``h2o``, ``quest+page=32``, ...) take as many bytes as the first method that is not
    a baseline, or the share in ``+keep=``.

    Raises: ConfigError if there is no method, or nothing states the bytes of the baselines
    """
    wanted = [name for name in dict.fromkeys(names) if name != FULL]
    if not wanted:
        raise ConfigError(f"methods={list(names)!r}: expected one besides {FULL!r}")
    baselines = Baselines(model_path)
    found = [
        baselines.parse(name) if is_baseline(name) else parse_method(name, model_path, base, dtype)
        for name in wanted
    ]
    if isinstance(found[0], EqualBytes):
        raise ConfigError(
            f"method {wanted[0]!r}: takes as many bytes as a method before it; "
            f"name one, as in default,{wanted[0]}, or say +keep=0.3"
        )
    return found


def check_served(methods: Sequence[Method | EqualBytes]) -> None:
    """Raise ConfigError for a method that a server of its model could not offer.

    A study calls it before the first method runs, which may take hours.
    """
    for method in methods:
        if isinstance(method, EngineMethod):
            method.check()


def _with_settings(name: str, base: AppConfig) -> AppConfig:
    """``base`` with the settings in a method's name; a policy starts from its own defaults."""
    policy, *settings = name.split("+")
    kept = base.compressor
    given: dict[str, object] = {
        "profile": kept.profile,
        "learned": kept.learned,
        "policy": policy,
    }
    compressor = asdict(base.compressor) if policy == DEFAULT else given
    selection = asdict(base.decode.selection)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"method {name!r}: expected +setting=value, got {setting!r}")
        of_selection = key.startswith(SELECTION)
        fields = selection if of_selection else compressor
        fields[key.removeprefix(SELECTION)] = cast("object", yaml.safe_load(value))
    built = AppConfig.from_mapping({"compressor": compressor, "decode": {"selection": selection}})
    decode = replace(base.decode, selection=built.decode.selection)
    return replace(base, compressor=built.compressor, decode=decode)
