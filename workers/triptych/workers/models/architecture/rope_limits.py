"""Keeps rotary embeddings from changing with the longest sequence of a batch."""

from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from triptych.core.errors import ModelError


def fix_rope(model: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """Fix the frequencies to those of short sequences; tokens up to which they are the model's.

    ``longrope`` and ``dynamic`` embeddings have other frequencies for all tokens of a batch once
    one sequence exceeds the length that the model was trained for first. None: no limit.

    Raises: ModelError if only some layers have such embeddings
    """
    limits = list[int]()
    for module in model.modules():
        kind = cast("str | dict[str, str] | None", getattr(module, "rope_type", None))
        if isinstance(kind, dict) and any(map(_changes, kind.values())):
            raise ModelError("some layers have rotary embeddings that change with the length")
        if not isinstance(kind, str) or not _changes(kind):
            continue
        module.rope_type = cast("Any", "default")
        limits.append(_trained_tokens(config))
    return min(limits, default=None)


def _changes(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _trained_tokens(config: PreTrainedConfig) -> int:
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return int(str(first))
