"""Loads a model directory: network, tokenizer and facts."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triptych.core.config import DType, PromptQuantization, Quantization
from triptych.core.errors import ModelError
from triptych.core.messages import Stage
from triptych.kernels import Int8Product, multiplies_bytes, multiplies_tiles
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.facts import ModelFacts, describe, weights_of
from triptych.workers.models.fused.model import FusedModel
from triptych.workers.models.tokenizer import FastTokenizer, open_tokenizer
from triptych.workers.models.traits import PlainTraits
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.models.weights.linear import Packing, Packings
from triptych.workers.models.weights.plain_weights import drop_read_pages, read_plain
from triptych.workers.models.weights.scheme import scheme_of

INT4_BITS = 4


class Network(Protocol):
    """A forward pass over a ragged batch, with constant weights."""

    @property
    def can_exit(self) -> bool:
        """Whether tokens can exit before the last layer."""
        ...

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a pass reads: all but an untied embedding."""
        ...

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """Shapes:  tokens, positions (T,); logits_at (N,) -> (N, vocab) float32"""
        ...

    def for_prefill(self) -> "Network":
        """The same network as prefill runs it."""
        ...

    def for_decode(self) -> "Network":
        """The same network, with the same weights, as decode steps run it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelFacts):
    """A decoder-only language model, ready to run."""

    network: Network
    tokenizer: FastTokenizer


def load(
    path: Path,
    dtype: DType,
    device: str = "cpu",
    *,
    fused: bool = True,
    quantization: Quantization = "auto",
    prompts: PromptQuantization = "none",
    stages: Collection[Stage] = ("prefill", "decode"),
) -> LoadedModel:
    """Load a directory in Hugging Face's form; only safetensors, never code from the directory.

    Plain layers run fused unless ``fused`` is false; all others run through transformers.
    ``prompts``: ``prefill.quantization``. ``stages``: those that this process runs.

    Raises: ModelError for what cannot be served, saying why
    """
    facts = describe(path)
    plain = facts.plain if fused else None
    layers = packing_of(path, quantization, device, is_plain=plain is not None)
    in_int8 = prompts_in_int8(path, prompts, quantization, layers, dtype, device, plain)
    packings = packings_of(layers, stages, in_int8=in_int8)
    is_small = quantization in ("auto", "int4") and dtype == "bfloat16"
    if is_small and plain is not None and device == "cpu":
        packings = replace(packings.made_smaller(), rounds_prompts=prompts == "auto")
    with torch.inference_mode():
        network = _network(path, facts, dtype, device, plain, packings)
    tokenizer = open_tokenizer(path)
    if weights_of(path) != facts.weights:
        raise ModelError(f"{path}: its weights changed while they were loaded: start again")
    known = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return LoadedModel(network=network, tokenizer=tokenizer, **known)


def packing_of(path: Path, quantization: Quantization, device: str, *, is_plain: bool) -> Packing:
    """How linear layers are kept.

    Raises: ModelError if 8 or 4 bits were asked for and are not possible
    """
    is_possible = is_plain and device == "cpu"
    if quantization in ("int8", "int4"):
        _check_possible(path, f"model.quantization: {quantization}", is_possible=is_possible)
        return quantization
    if quantization == "none" or not is_possible:
        return "dense"
    scheme = scheme_of(path)
    return "int4_if_exact" if scheme is not None and scheme.bits == INT4_BITS else "dense"


def prompts_in_int8(
    path: Path,
    prompts: PromptQuantization,
    quantization: Quantization,
    layers: Packing,
    dtype: DType,
    device: str,
    plain: PlainTraits | None,
) -> bool:
    """Whether prefill multiplies in 8 bits, and decode does not.

    Raises: ModelError if that was asked for and is not possible
    """
    is_possible = plain is not None and device == "cpu"
    if prompts == "int8":
        _check_possible(path, "prefill.quantization: int8", is_possible=is_possible)
        return layers != "int8"
    fits = is_possible and multiplies_bytes() and not multiplies_tiles()
    return fits and layers == "dense" and prompts == quantization == "auto" and dtype == "bfloat16"


def packings_of(layers: Packing, stages: Collection[Stage], *, in_int8: bool) -> Packings:
    """How a process packs the weights that its stages read.

    >>> packings_of("dense", ["prefill"], in_int8=True)
    Packings(layers='int8', head='dense', prompts=None, rounds_prompts=False)
    """
    head: Packing = "int8" if layers == "int8" else "dense"
    if not in_int8 or "prefill" not in stages:
        return Packings(layers, head)
    return Packings(layers, head, "int8") if "decode" in stages else Packings("int8", head)


def _check_possible(path: Path, setting: str, *, is_possible: bool) -> None:
    if not is_possible:
        raise ModelError(
            f"{path}: {setting} needs a CPU and plain layers (docs/models.md): set it to auto"
        )
    if setting.endswith("int8") and not Int8Product.takes_here():
        raise ModelError(f"{path}: {setting} needs a processor of x86: set it to auto")


def _network(
    path: Path,
    facts: ModelFacts,
    dtype: DType,
    device: str,
    plain: PlainTraits | None,
    packings: Packings,
) -> Network:
    if plain is not None:
        network = FusedModel(facts, plain, read_plain(path, plain, dtype, device), packings)
        drop_read_pages(path)
        return network
    from triptych.workers.models.hf_model import (  # noqa: PLC0415 - plain layers do not need it
        HFModel,
    )

    return HFModel.read(path, facts, dtype, device)
