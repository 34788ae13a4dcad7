"""Weights of plain layers: read from a model's files, and packed for fast matrix products.

Other weight formats fit in here: any function from (T, in) to (T, out) can replace a linear layer.
"""

import ctypes
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.workers.models.store.checkpoint_files import HEADS, layers_prefix, match_names
from triptych.workers.models.traits import HEAD, PlainTraits

Weights = Mapping[str, Tensor]
"""By their names in a checkpoint."""

LONGEST_SUM = 1024
"""Longest sums that oneDNN computes in the same order for one row as for several. Longer ones are
computed for two rows: that takes as long, since it is the weights that are read."""

Linear = Callable[[Tensor], Tensor]
"""Shapes: (T, in) -> (T, out)"""

EMBEDDING = "model.embed_tokens.weight"


def read_plain(path: Path, plain: PlainTraits, dtype: DType, device: str) -> Weights:
    """All weights, memory-mapped if type and device match the files.

    If the files do not hold exactly the expected tensors, as in older formats, transformers reads
    them: it converts more formats, and reports missing weights.

    Raises: ModelError for what cannot be loaded, saying why
    """
    stored = _stored(path)
    expected = dict(plain.tensors)
    if plain.is_tied:
        expected.pop(HEAD, None)
    names = match_names(stored, expected)
    found = {name: stored[at] for name, at in names.items() if at in stored}
    prefix = layers_prefix(stored)
    # Of a multimodal checkpoint only the layers that read text are served.
    others = [at for at in stored.keys() - set(names.values()) if at.startswith((prefix, *HEADS))]
    if others or {name: tuple(tensor.shape) for name, tensor in found.items()} != expected:
        return _through_transformers(path, plain, dtype, device)
    kind = getattr(torch, dtype)
    read = {name: tensor.to(device=device, dtype=kind) for name, tensor in found.items()}
    return {**read, HEAD: read[EMBEDDING]} if plain.is_tied else read


def _stored(path: Path) -> Weights:
    """Every tensor of a model's files, memory-mapped."""
    found = dict[str, Tensor]()
    try:
        for file in sorted(path.glob("*.safetensors")):
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be loaded: {error}") from error
    return found


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


# ------------------------------------------------------------------ packed for products


def pack(weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> Linear:
    """One matrix product for linear layers that share their input, outputs side by side.

    On a CPU, oneDNN's blocked weight layout makes the product about 1.4x faster in
    bfloat16 for 1 to 64 rows, and up to 2x in float32 where MKL does not use the widest
    vectors (AMD); it was never slower, at 512 rows neither. A row of the product has the
    same bits whatever the number of rows, which torch's own product does not promise.

    Shapes:  weights (out_i, in), biases (out_i,) -> (T, in) to (T, sum of out_i)
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    bias = _bias(weights, biases)
    if weight.device.type == "cpu" and _onednn_multiplies(weight.dtype):
        return _blocked(weight, bias)
    return lambda rows: F.linear(rows, weight, bias)


def _bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The concatenated biases; zeros where a layer has none."""
    if all(bias is None for bias in biases):
        return None
    parts = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in parts])


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native or dtype == torch.float32


def _blocked(weight: Tensor, bias: Tensor | None) -> Linear:
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    is_long = weight.shape[1] > LONGEST_SUM

    def product(rows: Tensor) -> Tensor:
        alone = is_long and len(rows) == 1
        given = rows.expand(2, -1).contiguous() if alone else rows
        result = torch.ops.mkldnn._linear_pointwise.default(given, blocked, bias, "none", [], "")
        return result[:1] if alone else result

    return product
