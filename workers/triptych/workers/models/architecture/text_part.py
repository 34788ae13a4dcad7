# transformers leaves the methods of its configs untyped.
# pyright: reportUnknownMemberType=false
"""The part of a multimodal checkpoint that reads text."""

import re
from collections.abc import Collection, Mapping

from transformers import AutoConfig, PreTrainedConfig

from triptych.core.errors import ModelError
from triptych.workers.models.store.checkpoint_files import HEADS, layers_prefix

SAME_LAYERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Text parts that compute what another architecture does. Their rotary embeddings have a position
for each axis of an image; in text all three are equal."""
IN_SECTIONS = ("qwen2_vl_text", "qwen2_5_vl_text")
"""Those of them in which consecutive pairs of channels belong to an axis (M-RoPE)."""
SECTIONS = (16, 24, 24)
"""Pairs of channels of time, row and column, where a config does not say."""

LOOKS_AHEAD = ("paligemma", "colpali")
"""Models in which the prompt attends in both directions."""


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the layers that read text; ``config`` itself if there are no others.

    Raises: ModelError if they are not a causal language model
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    if config.model_type in LOOKS_AHEAD:
        raise ModelError(f"prompts of {config.model_type} attend in both directions")
    text = _as_known(text)
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


def _as_known(text: PreTrainedConfig) -> PreTrainedConfig:
    """The same settings for the architecture that computes the same."""
    known = SAME_LAYERS.get(text.model_type)
    if known is None:
        return text
    settings = text.to_dict()
    settings.pop("model_type")
    rope = dict(settings.get("rope_parameters") or {})
    settings["rope_parameters"] = {
        key: value for key, value in rope.items() if not key.startswith("mrope")
    }
    made = AutoConfig.for_model(known, **settings)
    if text.model_type in IN_SECTIONS:
        made.rotary_sections = tuple(rope.get("mrope_section", SECTIONS))
    return made


def renamings(stored: Collection[str]) -> Mapping[str, str]:
    """Patterns of names in a multimodal checkpoint, and the names in the text part."""
    prefix = layers_prefix(stored)
    found = {f"^{re.escape(prefix)}": "model."} if prefix not in ("", "model.") else {}
    head = next((name for name in HEADS if name in stored), HEADS[0])
    return found if head == HEADS[0] else {**found, f"^{re.escape(head)}": HEADS[0]}
