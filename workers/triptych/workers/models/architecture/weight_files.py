# transformers leaves its loading functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Checks that a checkpoint has all weights of a model, by headers alone.

transformers renames, splits and merges weights of many architectures while it loads them, so its
own loader runs, with tensors on torch's ``meta`` device.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from triptych.core.errors import ModelError
from triptych.workers.models.architecture.text_part import renamings, text_part
from triptych.workers.models.pretrained import no_progress_bar, read_config, without_weights
from triptych.workers.models.store.checkpoint_files import stored_weights
from triptych.workers.models.store.tensor_headers import StoredTensor

logger = logging.getLogger(__name__)

_SHOWN = 3


def check_weights(path: Path) -> None:
    """Raise ModelError if weights are missing, or have other shapes than the config says."""
    config = read_config(path)
    text = text_part(config)
    model = without_weights(text)
    stored = stored_weights(path)
    names = {} if text is config else dict(renamings(stored))
    try:
        missing, others = _load_on_meta(model, stored, names)
    except (ImportError, AttributeError, TypeError) as error:  # another version of transformers
        logger.warning("%s: weights are checked when they are loaded: %r", path, error)
        return
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        listed = ", ".join(sorted(missing)[:_SHOWN])
        raise ModelError(f"{path}: weights are missing: {listed}{more}: download the model again")
    if others:
        name, here, expected = others[0]
        raise ModelError(
            f"{path}: {name} has shape {list(here)}, and config.json says {list(expected)}: take "
            "both from the same model"
        )


def _load_on_meta(
    model: PreTrainedModel, stored: dict[str, StoredTensor], names: dict[str, str]
) -> tuple[set[str], Sequence[tuple[str, Sequence[int], Sequence[int]]]]:
    """Weights that no tensor fills, and those with another shape."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.modeling_utils import LoadStateDictConfig  # noqa: PLC0415

    tensors = {
        name: torch.empty(tensor.shape, dtype=model.dtype, device="meta")
        for name, tensor in stored.items()
    }
    settings = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=model.dtype,
        weight_mapping=cast("Any", get_model_conversion_mapping(model, names or None)),
    )
    with no_progress_bar():
        report, _ = model._load_pretrained_model(model, tensors, None, settings)
    tied = cast("dict[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    missing = {name for name in report.missing_keys if tied.get(name) in (None, name)}
    return missing, list(report.mismatched_keys)
