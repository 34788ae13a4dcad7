# Triton's interpreter has no types.
# pyright: basic
"""Triton's interpreter rounds to bfloat16 as a GPU does: to nearest, where it cuts bits off."""

import numpy as np
import torch
from triton.runtime import interpreter


def round_to_nearest() -> None:
    """Change the interpreter of this process."""
    interpreter.InterpreterBuilder.create_fp_trunc = _truncated


def _truncated(builder, source, target):
    if target.scalar != interpreter.tl.bfloat16 or source.data.dtype != np.float32:
        return builder.cast_impl(source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
    shape = np.shape(source.data)  # a scalar comes back with one dimension
    return interpreter.TensorHandle(rounded.numpy().view(np.uint16).reshape(shape), target.scalar)
