"""Checks the files of a checkpoint by their headers, before weights are read."""

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from triptych.core.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
READ_DTYPES = {"F64", "F32", "F16", "BF16"}
"""Data types of weights that are read; others are quantized."""
QUANTIZED_ENDINGS = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv",
                     ".absmax", ".quant_map")  # fmt: skip
"""How names of tensors end in checkpoints that are quantized."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of the output projection; the second in multimodal checkpoints."""
_EMBEDDING = "embed_tokens.weight"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of a file describes it."""

    dtype: str
    shape: tuple[int, ...]


def check_checkpoint(path: Path, expected: Mapping[str, tuple[int, ...]] | None) -> None:
    """Check that all weights are there, whole, and of a kind that is read.

    ``expected``: name and shape of every weight; None: only the files are checked.

    Raises: ModelError naming the file and what to do
    """
    _check_shards(path)
    found = dict[str, StoredTensor]()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no .safetensors file (.bin and .pt are never loaded)")
    for file in files:
        found |= read_tensors(file)
    _refuse_quantized(path, found)
    if expected is not None:
        _check_names(path, found, expected)


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


def read_tensors(file: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, by name.

    Raises: ModelError if the file is cut short or something else
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        found = {
            name: StoredTensor(str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in tensors.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file}: not a safetensors file, or cut short ({error})") from error
    whole, here = 8 + length + max(ends, default=0), file.stat().st_size
    if here != whole:
        raise ModelError(f"{file}: has {here} bytes, expected {whole}: download it again")
    return found


def _refuse_quantized(path: Path, found: Mapping[str, StoredTensor]) -> None:
    quantized = [
        f"{name} ({tensor.dtype})"
        for name, tensor in found.items()
        if name.endswith(QUANTIZED_ENDINGS)
        or (name.endswith(".weight") and tensor.dtype not in READ_DTYPES)
    ]
    if quantized:
        raise ModelError(
            f"{path}: {_listed(quantized)} are quantized: only weights in float32, bfloat16 and "
            "float16 are read. Take the model's unquantized checkpoint, or a .gguf file"
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


def stored_names(path: Path) -> set[str]:
    """Names of all tensors of a directory.

    Raises: ModelError if a file is cut short or something else
    """
    return {name for file in path.glob("*.safetensors") for name in read_tensors(file)}


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
