"""Weights of plain layers, straight from a model's files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.workers.models.facts import PlainTraits

Weights = Mapping[str, Tensor]
"""By their names in a checkpoint."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_plain(path: Path, plain: PlainTraits, dtype: DType, device: str) -> Weights:
    """All weights, mapped if type and device are those of the files.

    Where files do not hold exactly the tensors that the layers have, as an older form would not,
    transformers reads them: it knows more forms than this, and says what is missing.

    Raises: ModelError for what cannot be loaded, saying why
    """
    found = _stored(path)
    expected = dict(plain.tensors)
    if plain.is_tied:
        expected.pop(HEAD, None)
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != expected:
        return _through_transformers(path, plain, dtype, device)
    kind = getattr(torch, dtype)
    read = {name: tensor.to(device=device, dtype=kind) for name, tensor in found.items()}
    return {**read, HEAD: read[EMBEDDING]} if plain.is_tied else read


def _stored(path: Path) -> Weights:
    """Every tensor of a model's files, mapped."""
    found = dict[str, Tensor]()
    try:
        for file in sorted(path.glob("*.safetensors")):
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be loaded: {error}") from error
    return found


def _through_transformers(path: Path, plain: PlainTraits, dtype: DType, device: str) -> Weights:
    from triptych.workers.models.hf_model import (  # noqa: PLC0415 - most models do not need it
        HFModel,
    )

    weights = HFModel.read(path, dtype, device).model.state_dict()
    if missing := sorted(plain.tensors.keys() - weights.keys()):
        raise ModelError(f"{path}: cannot be loaded: its layers are plain, but lack {missing[:5]}")
    return weights
