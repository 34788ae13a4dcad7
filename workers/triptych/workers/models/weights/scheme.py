"""How a checkpoint says that its weights are quantized."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from triptych.core.errors import ModelError

Method = Literal["gptq", "awq", "fp8", "mxfp4", "compressed-tensors"]

READ = "GPTQ with 4 or 8 bits, AWQ with 4, FP8, MXFP4, and compressed-tensors with 4 or 8 bits"
"""What is read."""
_BITS: Mapping[str, tuple[int, ...]] = {"gptq": (4, 8), "awq": (4,)}
_FORMATS = ("pack-quantized", "float-quantized", "naive-quantized", "int-quantized")
_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The ``quantization_config`` of a model, as far as its stored weights depend on it."""

    method: Method
    bits: int
    zeros_are_less_one: bool = False
    """Whether zero points are stored minus one, as in GPTQ's first format."""
    block: tuple[int, int] = _BLOCK
    """Rows and columns that share a scale where scales are stored for blocks."""

    @property
    def label(self) -> str:
        """For people.

        >>> QuantizationScheme("gptq", 4).label
        'GPTQ, 4 bits'
        """
        labels: Mapping[str, str] = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4"}
        return f"{labels.get(self.method, self.method)}, {self.bits} bits"


def scheme_of(path: Path) -> QuantizationScheme | None:
    """The scheme of a model directory; None if its weights are not quantized.

    Raises: ModelError for a scheme that is not read, naming it
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        found = dict(config).get("quantization_config")
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: no usable config: {error}") from error
    if found is None:
        return None
    try:
        return _parse(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{path}: its weights are quantized in a way that is not read ({error}). {READ} are; "
            "take such a checkpoint, the unquantized one, or a .gguf file"
        ) from error


def _parse(found: Mapping[str, object]) -> QuantizationScheme:
    method = str(found["quant_method"])
    if method in _BITS:
        bits = int(cast("int", found["bits"]))
        _require(bits in _BITS[method], f"{method} with {bits} bits")
        if method == "awq":
            version = str(found.get("version", "gemm"))
            _require(version.lower() == "gemm", f"awq in the format {version!r}")
            return QuantizationScheme("awq", bits)
        is_first = str(found.get("checkpoint_format", "gptq")) != "gptq_v2"
        return QuantizationScheme("gptq", bits, zeros_are_less_one=is_first)
    if method == "fp8":
        block = cast("list[int]", found.get("weight_block_size") or _BLOCK)
        return QuantizationScheme("fp8", 8, block=(int(block[0]), int(block[1])))
    if method == "mxfp4":
        return QuantizationScheme("mxfp4", 4)
    _require(method == "compressed-tensors", f"quant_method {method!r}")
    return _compressed(found)


def _compressed(found: Mapping[str, object]) -> QuantizationScheme:
    kind = str(found.get("format"))
    _require(kind in _FORMATS, f"compressed-tensors in the format {kind!r}")
    groups = cast("Mapping[str, Mapping[str, Mapping[str, object]]]", found["config_groups"])
    weights = [group["weights"] for group in groups.values()]
    bits = {int(cast("int", one["num_bits"])) for one in weights}
    _require(len(bits) == 1 and bits <= {4, 8}, f"compressed-tensors with {sorted(bits)} bits")
    block = cast("list[int]", weights[0].get("block_structure") or _BLOCK)
    return QuantizationScheme(
        "compressed-tensors", bits.pop(), block=(int(block[0]), int(block[1]))
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
