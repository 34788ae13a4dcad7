# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""Samples one token of each row on the GPU, in one launch for the whole batch."""

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.draw.gpu_draws import draw_rows
from triptych.kernels.draw.reference import SETTINGS
from triptych.kernels.triton.launch import Launch, check_device, dense

BLOCK = 4096
"""Logits that a program reads at a time."""
WARPS = 8


def draw_tokens(logits: Tensor, settings: Tensor | None) -> Tensor:
    """See ``reference.draw_tokens``.

    A program for each row reads it again for each bit of a border that it has to find, at most 31
    times for each of top-k and top-p. So no row is sorted, and the host waits for nothing.
    """
    out = logits.new_empty(len(logits), dtype=torch.int64)
    plan_draw(logits, settings, out).run()
    return out


def plan_draw(logits: Tensor, settings: Tensor | None, out: Tensor) -> Launch:
    """The launch of ``draw_tokens``.

    Raises:  ConfigError if shapes or types are others
    """
    check_device("draw_tokens", logits, settings, out)
    rows, vocab = logits.shape
    if logits.dtype != torch.float32:
        raise ConfigError(f"draw_tokens: logits {logits.dtype}: expected float32")
    if settings is not None and (
        settings.shape != (SETTINGS, rows) or settings.dtype != torch.float64
    ):
        raise ConfigError(
            f"draw_tokens: settings {tuple(settings.shape)} {settings.dtype}: expected float64 "
            f"{(SETTINGS, rows)}"
        )
    logits = dense(logits)
    chosen = None if settings is None else settings.contiguous()
    arguments = logits, logits.stride(0), chosen, vocab, out
    return Launch(draw_rows, (rows,), arguments, {"BLOCK": BLOCK}, WARPS)
