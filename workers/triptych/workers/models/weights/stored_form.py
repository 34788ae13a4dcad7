"""Which tensors of a quantized checkpoint stand for which weight, by headers alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from triptych.core.errors import ModelError
from triptych.workers.models.store.tensor_headers import StoredTensor
from triptych.workers.models.weights import mxfp4
from triptych.workers.models.weights.scheme import READ, QuantizationScheme, scheme_of

WORD_BITS = 32
WORDS = ("qweight", "weight_packed")
"""Last part of the names of tensors with several integers in a word."""
PARTS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point",
         "weight_shape", "weight_g_idx")  # fmt: skip
"""Last part of the names of tensors that the integers or float8 numbers beside them need."""
UNUSED = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "q_scale")
"""Of quantized activations and keys and values, which here have 16 bits or pages."""
_OTHERS = ("absmax", "quant_map", "weight_global_scale", "qweight_type")
"""Found only in checkpoints that are not read, as those of bitsandbytes."""
_PLAIN = {"F64", "F32", "F16", "BF16"}
_NARROW = {"F8_E4M3", "I8"}
_SHOWN = 3


def weights_of_parts(path: Path, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Name and shape of the weights that the tensors of a checkpoint stand for.

    Raises: ModelError for weights that are quantized in a way that is not read
    """
    scheme = scheme_of(path)
    if scheme is None:
        _refuse(
            path, (name for name, tensor in found.items() if _is_quantized(name, tensor)), found
        )
        return dict(found)
    unread = (
        n for n, tensor in found.items() if _last(n) in _OTHERS or not _fits(n, tensor, found)
    )
    _refuse(path, unread, found)
    weights = dict[str, StoredTensor]()
    for name, tensor in found.items():
        last = _last(name)
        if scheme.method == "mxfp4":
            if name.endswith(mxfp4.BLOCKS):
                shape = mxfp4.weight_shape(tensor.shape)
                weights[name.removesuffix(mxfp4.BLOCKS)] = StoredTensor("BF16", shape)
            elif not name.endswith(mxfp4.SCALES):
                weights[name] = tensor
        elif last in WORDS:
            weights[weight_name(name)] = StoredTensor("F32", _unpacked(tensor.shape, scheme))
        elif last not in (*PARTS, *UNUSED):
            weights[name] = tensor
    return weights


def weight_name(words: str) -> str:
    """
    >>> weight_name("model.layers.0.mlp.down_proj.qweight")
    'model.layers.0.mlp.down_proj.weight'
    """
    return f"{words.rpartition('.')[0]}.weight"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_quantized(name: str, tensor: StoredTensor) -> bool:
    is_narrow = name.endswith(".weight") and tensor.dtype not in _PLAIN
    is_part = _last(name) in (*WORDS, *PARTS, *_OTHERS) or name.endswith(mxfp4.BLOCKS)
    return is_narrow or is_part


def _fits(name: str, tensor: StoredTensor, found: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is words, a part, or a weight of a type that is read."""
    if _last(name) in WORDS:
        return tensor.dtype == "I32" and len(tensor.shape) == 2
    if name.endswith(mxfp4.BLOCKS):
        beside = f"{name.removesuffix(mxfp4.BLOCKS)}{mxfp4.SCALES}"
        return tensor.dtype == "U8" and len(tensor.shape) == 4 and beside in found
    if tensor.dtype in _NARROW and _last(name) == "weight":
        return f"{name}_scale" in found or f"{name}_scale_inv" in found
    return tensor.dtype in _PLAIN or not name.endswith(".weight")


def _refuse(path: Path, names: Iterable[str], found: Mapping[str, StoredTensor]) -> None:
    wrong = [f"{name} ({found[name].dtype})" for name in names]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ModelError(
            f"{path}: {', '.join(wrong[:_SHOWN])}{more} are quantized in a way that is not read. "
            f"{READ} are, where config.json says so; take such a checkpoint, the unquantized one, "
            "or a .gguf file"
        )


def _unpacked(words: tuple[int, ...], scheme: QuantizationScheme) -> tuple[int, ...]:
    """Shape of a weight, (out, in)."""
    each, (first, second) = WORD_BITS // scheme.bits, words
    if scheme.method == "gptq":
        return second, first * each
    if scheme.method == "awq":
        return second * each, first
    return first, second * each
