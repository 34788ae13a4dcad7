"""Weights of plain layers, read from a model's files."""

import ctypes
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.workers.models.store.checkpoint_files import (
    HEADS,
    layers_prefix,
    match_names,
    stored_weights,
)
from triptych.workers.models.traits import HEAD, PlainTraits
from triptych.workers.models.weights.dequantize import DequantizedWeights
from triptych.workers.models.weights.scheme import scheme_of

Weights = Mapping[str, Tensor]
"""By their names in a checkpoint."""

EMBEDDING = "model.embed_tokens.weight"


def read_plain(path: Path, plain: PlainTraits, dtype: DType, device: str) -> Weights:
    """All weights, memory-mapped if type and device match the files.

    If the files do not hold exactly the expected tensors, as in older formats, transformers reads
    them: it converts more formats, and reports missing weights.

    Raises: ModelError for what cannot be loaded, saying why
    """
    stored, expected = stored_weights(path), dict(plain.tensors)
    if plain.is_tied:
        expected.pop(HEAD, None)
    names = match_names(stored, expected)
    found = {name: stored[at].shape for name, at in names.items() if at in stored}
    prefix = layers_prefix(stored)
    # Of a multimodal checkpoint only the layers that read text are served.
    others = [at for at in stored.keys() - set(names.values()) if at.startswith((prefix, *HEADS))]
    if others or found != expected:
        return _through_transformers(path, plain, dtype, device)
    return PlainWeights(open_weights(path), names, getattr(torch, dtype), device)


@dataclass(frozen=True, slots=True)
class PlainWeights(Mapping[str, Tensor]):
    """Weights of plain layers by their usual names, in the type that the model computes in.

    One that is stored in another type is converted each time it is asked for.
    """

    stored: Mapping[str, Tensor]
    names: Mapping[str, str]
    """Names in the files."""
    dtype: torch.dtype
    device: str

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[self.names[name]].to(device=self.device, dtype=self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def open_weights(path: Path) -> Weights:
    """Every weight of a model's files, memory-mapped, or dequantized when it is asked for.

    Raises: ModelError for what cannot be loaded, saying why
    """
    found = dict[str, Tensor]()
    try:
        for file in sorted(path.glob("*.safetensors")):
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be loaded: {error}") from error
    scheme = scheme_of(path)
    return found if scheme is None else DequantizedWeights(found, scheme)


def drop_read_pages(path: Path, maps: Path = Path("/proc/self/smaps")) -> int:
    """Release the memory of the mapped weight files in a directory; the number of bytes mapped.

    A packed model reads of them only the rows of its embedding, which the kernel reads again when
    they are used. A mapping with pages that were written is left alone.
    """
    try:
        parts = _MAPPING.split(maps.read_text())[1:]
    except OSError:  # no Linux
        return 0
    folder, dropped = path.resolve(), 0
    for start, end, file, facts in zip(*(iter(parts),) * 4, strict=True):
        is_clean = "\nAnonymous:             0 kB" in facts
        if is_clean and Path(file).suffix == ".safetensors" and folder in Path(file).parents:
            first, size = int(start, 16), int(end, 16) - int(start, 16)
            advised = ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED
            )
            dropped += size if advised == 0 else 0
    return dropped


_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)$", re.MULTILINE)
"""The first line of a mapping in ``smaps``: addresses and the file."""


def _through_transformers(path: Path, plain: PlainTraits, dtype: DType, device: str) -> Weights:
    from triptych.workers.models.hf_model import (  # noqa: PLC0415 - most models do not need it
        read_model,
    )

    weights = read_model(path, dtype, device).state_dict()
    if missing := sorted(plain.tensors.keys() - weights.keys()):
        raise ModelError(f"{path}: cannot be loaded: its layers are plain, but lack {missing[:5]}")
    return weights
