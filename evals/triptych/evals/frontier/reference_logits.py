# torch.from_numpy has no type hints.
# pyright: reportUnknownMemberType=false
"""Logits of the full cache, kept on disk: methods that are added later need no prefill of it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ReferenceLogits:
    """Logits of each probe in a file of its own, float32 [scored tokens, vocab]."""

    folder: Path

    def read(self, group: str, number: int) -> Tensor | None:
        """None: they are not computed yet."""
        path = self._path(group, number)
        return torch.from_numpy(np.load(path, allow_pickle=False)) if path.exists() else None

    def write(self, group: str, number: int, logits: Tensor) -> None:
        """Write a file as a whole or not at all."""
        path = self._path(group, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, logits.numpy(), allow_pickle=False)
        partial.replace(path)

    def _path(self, group: str, number: int) -> Path:
        return self.folder / f"{group}-{number}.npy"
