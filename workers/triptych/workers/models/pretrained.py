# transformers leaves the arguments of its factories untyped; only this module calls them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false
"""Typed wrappers of transformers' factories, without remote code and without the network.

Every function here raises ``ModelError`` for what transformers cannot read.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from triptych.core.config import DType
from triptych.core.errors import ModelError

_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that transformers raises for invalid files and settings."""


def read_config(path: Path) -> PreTrainedConfig:
    """Read the config of a directory or a ``.gguf`` file.

    It says nothing of quantization: weights are dequantized before transformers gets them.
    """
    with readable(path, "no usable config"):
        config = AutoConfig.from_pretrained(_directory(path), **_options(path))
        if getattr(config, "quantization_config", None) is not None:
            delattr(config, "quantization_config")
        return config


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer, with its chat template, of a directory or a ``.gguf`` file."""
    with readable(path, "no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(_directory(path), **_options(path))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{path}: needs a tokenizer.json (found a {type(tokenizer).__name__})")
    return tokenizer


def read_end_tokens(path: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """End tokens: those of the generation config if it has any, else those of the config."""
    eos: object = config.eos_token_id
    if (path / "generation_config.json").is_file():
        with readable(path, "no usable generation_config.json"):
            generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        eos = eos if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return ()
    return tuple(cast("list[int]", eos)) if isinstance(eos, list) else (cast("int", eos),)


def read_weights(
    path: Path,
    config: PreTrainedConfig,
    dtype: DType,
    device: str,
    attention: str,
    renamings: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Load a model from safetensors only, memory-mapped if the type is that on disk.

    ``renamings``: patterns of names in the files, and what the model calls them.
    ``weights``: what the files stand for, where they are quantized.
    """
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path}: no .safetensors file (.bin and .pt are never loaded)")
    with readable(path, "cannot be loaded"), no_progress_bar():
        # Only a class of models, not the factory, takes weights without a path.
        factory = AutoModelForCausalLM if weights is None else type(without_weights(config))
        loaded = factory.from_pretrained(
            path if weights is None else None,
            state_dict=None if weights is None else dict(weights),
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=dict(renamings or {}) or None,
        )
        model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
        if missing := sorted(report["missing_keys"]):  # would be filled with random numbers
            raise ModelError(f"{path}: weights are missing: {missing[:5]}")
        return model.to(device).eval().requires_grad_(False)


def without_weights(config: PreTrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """A model on torch's ``meta`` device: names and shapes without memory."""
    kind = Path(str(config.model_type))
    with readable(kind, "not a causal language model"), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=attention,
                experts_implementation="batched_mm",  # others need values, or certain types
                trust_remote_code=False,
            )
        except KeyError as error:
            if error.args == (attention,):
                raise ModelError(
                    f"{kind}: its layers compute attention on their own, not through "
                    "transformers' attention interface"
                ) from error
            raise
        return cast("PreTrainedModel", model)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of the model."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def write_settings(
    target: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write config, generation config and tokenizer in Hugging Face format."""
    config.save_pretrained(target)
    ids = {f"{key}_token_id": getattr(config, f"{key}_token_id") for key in ("bos", "eos", "pad")}
    GenerationConfig(**ids).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _directory(path: Path) -> Path:
    return path.parent if path.suffix == ".gguf" else path


def _options(path: Path) -> dict[str, object]:
    options: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
    return options | {"gguf_file": path.name} if path.suffix == ".gguf" else options


@contextmanager
def readable(path: Path, problem: str) -> Generator[None]:
    """Translate the errors that transformers raises for a bad model into ``ModelError``."""
    try:
        yield
    except _READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: {problem}: {reason}") from error


@contextmanager
def no_progress_bar() -> Generator[None]:
    """Disables transformers' progress bars and load reports, which would fill a worker's log.

    What a report says of missing weights is an error here.
    """
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
