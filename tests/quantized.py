"""Writes quantized checkpoints as other tools do: GPTQ, AWQ, FP8, compressed-tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
Parts = dict[str, Tensor]
"""Tensors of one linear layer by the last part of their names."""

AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)
"""Neighbour of each place in a word."""


def quantize(weight: Tensor, bits: int = 4, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Integers (out, in), scales and zero points (out, in / group)."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.flatten(1).int(), scales, zeros.int()


def words(values: Tensor, bits: int) -> Tensor:
    """Rows of integers as 32-bit words, the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    packed = (values.long().unflatten(1, (-1, 32 // bits)) << shifts).sum(2)
    return (packed & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).contiguous()


def gptq(weight: Tensor, bits: int = 4, *, acts_in_order: bool = True) -> Parts:
    columns = torch.arange(weight.shape[1])
    order = columns if acts_in_order else torch.randperm(weight.shape[1])
    values, scales, zeros = quantize(weight[:, order], bits)
    back = order.argsort()
    return {
        "qweight": words(values[:, back], bits).T.contiguous(),
        "qzeros": words((zeros - 1).T, bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": (back // GROUP).int(),
    }


def awq(weight: Tensor) -> Parts:
    values, scales, zeros = quantize(weight)

    def packed(part: Tensor) -> Tensor:
        return words(part.T.unflatten(1, (-1, 8))[..., AWQ_PACKING].flatten(1), 4)

    return {
        "qweight": packed(values),
        "qzeros": packed(zeros),
        "scales": scales.T.half().contiguous(),
    }


def packed_tensors(weight: Tensor, bits: int = 4, *, symmetric: bool = False) -> Parts:
    if symmetric:
        scales = weight.unflatten(1, (-1, GROUP)).abs().amax(2) / (2 ** (bits - 1) - 1)
        grouped = weight.unflatten(1, (-1, GROUP)) / scales[..., None] + 2 ** (bits - 1)
        values, zeros = grouped.round().clamp(0, 2**bits - 1).flatten(1), None
    else:
        values, scales, zeros = quantize(weight, bits)
    parts = {
        "weight_packed": words(values, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return (
        parts
        if zeros is None
        else parts | {"weight_zero_point": words(zeros.T, bits).T.contiguous()}
    )


def fp8_blocks(weight: Tensor, block: int = 64) -> Parts:
    rows, columns = weight.shape
    tiles = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scales = tiles.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def fp8_rows(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return {
        "weight": (weight / scales).to(torch.float8_e4m3fn),
        "weight_scale": scales,
        "input_scale": torch.ones(1),
    }


def int8_rows(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def compressed(kind: str, bits: int) -> dict[str, object]:
    weights = {"num_bits": bits, "group_size": GROUP, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS: Mapping[str, tuple[Mapping[str, object], Callable[[Tensor], Parts]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda weight: gptq(weight, 8)),
    "gptq-desc-act": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda weight: gptq(weight, acts_in_order=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, fp8_blocks),
    "w4a16": (compressed("pack-quantized", 4), packed_tensors),
    "w4a16-symmetric": (
        compressed("pack-quantized", 4),
        lambda weight: packed_tensors(weight, symmetric=True),
    ),
    "w8a16": (compressed("pack-quantized", 8), lambda weight: packed_tensors(weight, 8)),
    "fp8-rows": (compressed("float-quantized", 8), fp8_rows),
    "w8a8": (compressed("int-quantized", 8), int8_rows),
}
"""What config.json says, and the writer of a layer."""


def write_quantized(source: Path, target: Path, form: str) -> Path:
    """Copy a model with its linear layers quantized; its weights must be in one file."""
    scheme, writer = FORMATS[form]
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    tensors = Parts()
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": one for part, one in writer(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
