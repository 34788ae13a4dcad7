"""The model that is served."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.core.config.values import require

DType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and in what precision it computes."""

    name: str = "smollm2-135m-instruct"
    """A known name, a directory in Hugging Face's form, a ``.gguf`` file, or a hub name, which
    ``@`` and a commit may follow: ``Qwen/Qwen3-0.6B@c1899de``."""

    served_model_name: str | tuple[str, ...] = ""
    """Name of the model in the API, or a list of names; answers have the first. Empty: ``name`` as
    it is given; the last part of it is accepted as well."""

    generation_config: Literal["auto", "none"] = "auto"
    """Where the defaults of ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty`` and ``max_tokens`` come from: ``auto``, the model's
    ``generation_config.json``; ``none``, OpenAI's defaults."""

    chat_template: str = ""
    """File with a Jinja chat template; empty: that of the model."""

    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """Whether reasoning between ``<think>`` and ``</think>`` is separated from the content of
    chats, and grammars begin after it: ``auto``, if the chat template has one of these tags;
    ``think``, always; ``none``, never."""

    dtype: DType = "bfloat16"
    """Type of weights and activations."""

    quantization: Quantization = "auto"
    """How the weights of linear layers are kept in memory: ``auto``, in 4 bits if they had
    been quantized to 4 bits and nothing is lost, else in ``dtype``; ``none``, in ``dtype``;
    ``int8``, in 8 bits, with inputs that are quantized to 8 bits as they come (a CPU of x86);
    ``int4``, in 4 bits, with a scale and a zero point for 32 weights. 8 and 4 bits need a CPU and
    plain layers. ``auto`` and ``int4`` also read a bfloat16 head in 8 bits on a CPU of x86,
    and compute the largest logits again in float32."""

    max_model_len: int | Literal["auto"] = "auto"
    """Maximum tokens of prompt plus answer; ``auto``: the context that the model was trained for.
    Above that context, sequences are computed in overlapping windows."""

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "a name or a path")
        names = self.served_names
        fits = all(names) and len(set(names)) == len(names)
        expected = "names that differ, none of them empty"
        require(fits, "model.served_model_name", self.served_model_name, expected)
        tokens = self.max_model_len
        require(tokens == "auto" or tokens > 1, "model.max_model_len", tokens, "'auto' or > 1")

    @property
    def arithmetic(self) -> str:
        """Data type and quantization: with the checkpoint, they determine all results."""
        return self.dtype if self.quantization == "auto" else f"{self.dtype}, {self.quantization}"

    @property
    def public_name(self) -> str:
        """The name in answers."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """Every name that clients may send.

        >>> ModelConfig(name="Qwen/Qwen3-0.6B").served_names
        ('Qwen/Qwen3-0.6B', 'Qwen3-0.6B')
        """
        if self.served_model_name:
            given = self.served_model_name
            return (given,) if isinstance(given, str) else given
        is_path = self.name.startswith(("/", ".", "~"))
        name = self.name if is_path else self.name.partition("@")[0]
        short = Path(name).name.removesuffix(".gguf")
        return tuple(dict.fromkeys((name, short or name)))
