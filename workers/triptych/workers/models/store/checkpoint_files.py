"""Checks the files of a checkpoint by their headers, before weights are read."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import cast

from triptych.core.errors import ModelError
from triptych.workers.models.store.tensor_headers import StoredTensor, read_tensors
from triptych.workers.models.weights.stored_form import weights_of_parts

INDEX = "model.safetensors.index.json"
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of the output projection; the second in multimodal checkpoints."""
_EMBEDDING = "embed_tokens.weight"
_SHOWN = 3


def check_checkpoint(path: Path, expected: Mapping[str, tuple[int, ...]] | None) -> None:
    """Check that all weights are there, whole, and of a kind that is read.

    ``expected``: name and shape of every weight; None: only the files are checked.

    Raises: ModelError naming the file and what to do
    """
    _check_shards(path)
    found = stored_weights(path)
    if expected is not None:
        _check_names(path, found, expected)


def stored_weights(path: Path) -> dict[str, StoredTensor]:
    """Name and shape of every weight in a model's files; of quantized ones, what they stand for.

    Raises: ModelError if there are none, or one is cut short or quantized in a way not read
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no .safetensors file (.bin and .pt are never loaded)")
    found = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    return weights_of_parts(path, found)


def _check_shards(path: Path) -> None:
    index = path / INDEX
    if not index.is_file():
        return
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(cast("Mapping[str, str]", weight_map).values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read ({error!r}): download it again") from error
    if missing := [name for name in shards if not (path / name).is_file()]:
        raise ModelError(
            f"{path}: {_listed(missing)} of {len(shards)} files in {INDEX} are missing: download "
            "them again"
        )


def _check_names(
    path: Path, found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes of the layers that read text."""
    names = match_names(found, expected)
    missing = [name for name in expected if names[name] not in found]
    if missing:
        raise ModelError(
            f"{path}: weights are missing: {_listed(missing)}: download the model again"
        )
    for name, shape in expected.items():
        here = found[names[name]].shape
        if here != shape:
            raise ModelError(
                f"{path}: {name} has shape {list(here)}, and config.json says {list(shape)}: "
                "take both from the same model"
            )


def layers_prefix(stored: Iterable[str]) -> str:
    """How the names of the layers that read text begin.

    >>> layers_prefix(["visual.patch.weight", "model.language_model.embed_tokens.weight"])
    'model.language_model.'

    ``model.`` in a text checkpoint; empty in one that was saved without its head.
    """
    found = [name for name in stored if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
    return min(found, key=len).removesuffix(_EMBEDDING) if found else "model."


def match_names(stored: Collection[str], expected: Iterable[str]) -> dict[str, str]:
    """Name in the files of each expected weight, whether it is there or not."""
    prefix = layers_prefix(stored)
    head = next((name for name in HEADS if name in stored), HEADS[0])
    return {
        name: head if name == HEADS[0] else prefix + name.removeprefix("model.")
        for name in expected
    }


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
