"""What a layer does that attention over pages does not compute is found and refused."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

from tests.families import TINY
from tests.tiny import byte_tokenizer
from triptych.core.errors import ModelError
from triptych.workers.models.facts import describe
from triptych.workers.models.load import load

Forward = Callable[..., Any]


class OwnConfig(LlamaConfig):
    model_type = "triptych_test"


class OwnModel(LlamaForCausalLM):
    """Llama with a change in each test."""

    config_class = OwnConfig


@pytest.fixture
def own(tmp_path: Path) -> Generator[Path]:
    """A saved model of a class that transformers' factories know."""
    AutoConfig.register("triptych_test", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnModel)
    torch.manual_seed(0)
    model = OwnModel(OwnConfig(**TINY, tie_word_embeddings=False))
    for weight in model.parameters():
        weight.data.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    yield tmp_path
    CONFIG_MAPPING._extra_content.pop("triptych_test")
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OwnConfig)


def test_the_model_is_served_without_a_change(own: Path) -> None:
    assert load(own, "float32").plain is None


def _masked(**functions: Callable[..., Tensor]) -> Callable[[Forward], Forward]:
    """Combine the causal mask with another."""
    causal = modeling_llama.create_causal_mask

    def change(forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Any:
            modeling_llama.create_causal_mask = lambda **mask: causal(**mask, **functions)
            try:
                return forward(*args, **kwargs)
            finally:
                modeling_llama.create_causal_mask = causal

        return changed

    return change


def _prefix(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The first tokens attend in both directions."""
    return (query < 3) & (key < 3)


def _dilated(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key) % 2 == 0


def _twice(forward: Forward) -> Forward:
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first, _ = forward(self, *args, **kwargs)
        second, weights = forward(self, *args, **kwargs)
        return first - 0.1 * second, weights

    return changed


def _with_argument(forward: Forward) -> Forward:
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs, position_bias=torch.zeros(1, device="meta"))

    return changed


def _changed_mask(forward: Forward) -> Forward:
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("attention_mask")
        return forward(self, *args, attention_mask=None if mask is None else mask + 1, **kwargs)

    return changed


@pytest.mark.parametrize(
    ("owner", "change", "reason"),
    [
        (LlamaModel, _masked(or_mask_function=_prefix), "looks ahead"),
        (LlamaModel, _masked(and_mask_function=_dilated), "neither causal nor a sliding window"),
        (LlamaAttention, _twice, "layer 0 attends more than once"),
        (LlamaAttention, _with_argument, "not supported: position_bias"),
        (LlamaAttention, _changed_mask, "changes the attention mask"),
    ],
    ids=["prefix", "dilated", "second call", "argument", "bias"],
)
def test_a_layer_by_hand_is_refused(
    own: Path,
    owner: type[nn.Module],
    change: Callable[[Forward], Forward],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Llama's own classes are fused, whatever they compute; this class is not.
    monkeypatch.setattr(owner, "forward", change(owner.forward))
    _without_cache(monkeypatch)
    with pytest.raises(ModelError, match=reason):
        describe(own)


def test_a_window_that_is_only_in_the_mask_is_found(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def windowed(**mask: Any) -> Any:
        mask["config"].sliding_window = 9
        return create_sliding_window_causal_mask(**mask)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    _without_cache(monkeypatch)
    assert {layer.window for layer in describe(own).layers} == {9}


def test_tokens_that_are_mixed_outside_of_attention_are_found(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's hidden state gets half of the one before, of whichever sequence that is."""
    forward: Forward = LlamaAttention.forward

    def changed(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return forward(self, hidden_states + 0.5 * before, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", changed)
    _without_cache(monkeypatch)
    with pytest.raises(ModelError, match="mix tokens outside of attention"):
        load(own, "float32")


def _without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The description is cached by files and code, which a patched class does not change."""
    monkeypatch.setattr(
        "triptych.workers.models.facts.cached",
        lambda _kind, _path, _files, make, parse: parse(make()),
    )
