"""The model that is served."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.core.config.values import require

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and in what precision it computes."""

    name: str = "smollm2-135m-instruct"
    """A known name, a directory in Hugging Face's form, a ``.gguf`` file, or a hub name."""

    served_model_name: str = ""
    """Name of the model in the API; empty: the last part of ``name``."""

    dtype: DType = "bfloat16"
    """Type of weights and activations."""

    max_model_len: int | Literal["auto"] = "auto"
    """Maximum tokens of prompt plus answer; ``auto``: the context that the model was trained for.
    Above that context, sequences are computed in overlapping windows."""

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "a name or a path")
        tokens = self.max_model_len
        require(tokens == "auto" or tokens > 1, "model.max_model_len", tokens, "'auto' or > 1")

    @property
    def public_name(self) -> str:
        return self.served_model_name or Path(self.name).stem.lower()
