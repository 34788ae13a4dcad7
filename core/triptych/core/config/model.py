"""The model that is served."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.core.config.values import require

DType = Literal["float32", "bfloat16", "float16"]


def cache_dir() -> Path:
    """Where models and kernels are kept: ``TRIPTYCH_CACHE_DIR`` or ``~/.cache/triptych``."""
    return Path(os.environ.get("TRIPTYCH_CACHE_DIR") or Path.home() / ".cache" / "triptych")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and in what precision it computes."""

    name: str = "smollm2-135m-instruct"
    """A known name, a directory in Hugging Face's form, a ``.gguf`` file, or a hub name."""

    served_name: str = ""
    """What clients call it; empty: the last part of ``name``."""

    dtype: DType = "bfloat16"
    """Type of weights and activations."""

    max_context_tokens: int | Literal["auto"] = "auto"
    """Tokens that it reads at once; ``auto``: as many as it was trained for."""

    longest_tokens: int = 0
    """Longest prompt plus answer; more than the context: it is read in windows. 0: the context."""

    window_overlap_tokens: int | Literal["auto"] = "auto"
    """Tokens of a window that the next one begins with; ``auto``: half of the context."""

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "a name or a path")
        tokens = self.max_context_tokens
        require(tokens == "auto" or tokens > 1, "model.max_context_tokens", tokens, "'auto' or > 1")
        require(self.longest_tokens >= 0, "model.longest_tokens", self.longest_tokens, ">= 0")
        overlap = self.window_overlap_tokens
        require(
            overlap == "auto" or overlap > 0,
            "model.window_overlap_tokens",
            overlap,
            "'auto' or > 0",
        )

    @property
    def public_name(self) -> str:
        return self.served_name or Path(self.name).stem.lower()
