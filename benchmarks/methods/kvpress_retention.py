"""Compare the tokens that our retention rules keep with those of kvpress, in kvpress's environment.

    PYTHONPATH=core:kernels /path/to/kvpress-env/bin/python \
        benchmarks/methods/kvpress_retention.py MODEL --keep 0.5,0.25 \
        --json benchmarks/results/kvpress_retention.json

MODEL is a directory. The prompt is a piece of Python's language reference. Keys, queries and
attention weights of the model with its full cache are given to our rules; a press sees the same
prompt. Our budgets are rounded and those of kvpress are cut, so the share should be a whole number
of tokens.
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from triptych.kernels.retain import (
    BUDGETS,
    FIRST_TOKENS,
    SCORES,
    ObservedPrompt,
    expected_attention,
    mean_rotation,
)

PRESSES: dict[str, Callable[[float], Any]] = {
    "streaming_llm": lambda drop: kvpress.StreamingLLMPress(compression_ratio=drop),
    "knorm": lambda drop: kvpress.KnormPress(compression_ratio=drop),
    "keydiff": lambda drop: kvpress.KeyDiffPress(compression_ratio=drop),
    "snapkv": lambda drop: kvpress.SnapKVPress(compression_ratio=drop),
    "pyramidkv": lambda drop: kvpress.PyramidKVPress(compression_ratio=drop),
    "adakv": lambda drop: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=drop)),
    "tova": lambda drop: kvpress.TOVAPress(compression_ratio=drop),
    "expected_attention": lambda drop: kvpress.ExpectedAttentionPress(compression_ratio=drop),
}
RULES = {
    "streaming_llm": ("recency", "per_head", None),
    "knorm": ("key_norm", "per_head", None),
    "keydiff": ("key_difference", "per_head", None),
    "snapkv": ("window_attention", "per_head", 64),
    "pyramidkv": ("window_attention", "per_layer", 64),
    "adakv": ("window_attention", "across_heads", 64),
    "tova": ("last_attention", "per_head", 1),
    "expected_attention": ("expected", "per_head", None),
}
"""Score, budget and last queries, as in ``core/methods/retention``."""


def kept_by_press(model: Any, prompt: Tensor, name: str, keep: float) -> Tensor:
    """Mask of the tokens that a press keeps, bool [L, KH, N]."""
    press, scores = PRESSES[name](1.0 - keep), list[Tensor]()
    scorer = press.press if name == "adakv" else press
    score = scorer.score

    def recorded(*given: Any, **named: Any) -> Tensor:
        scores.append(score(*given, **named))
        return scores[-1].clone()

    scorer.score = recorded
    with press(model):
        model(prompt, logits_to_keep=1)
    layers = [layer.self_attn for layer in model.model.layers]
    tokens = prompt.shape[1]
    if name == "adakv":
        return torch.stack([_unmasked(one.masked_key_indices, scores[0][0]) for one in layers])
    counts = [
        press.get_layer_budget(layer, tokens) if name == "pyramidkv" else int(tokens * keep)
        for layer in layers
    ]
    return torch.stack([_best(one[0], n) for one, n in zip(scores, counts, strict=True)])


def _unmasked(indices: tuple[Tensor, ...], like: Tensor) -> Tensor:
    mask = torch.ones_like(like, dtype=torch.bool)
    mask[indices[1], indices[2]] = False
    return mask


def _best(scores: Tensor, count: int) -> Tensor:
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True)


@dataclass(frozen=True)
class FullCache:
    """What the model computes with its full cache: L layers, H query heads, KH KV heads."""

    keys: Tensor
    """[L, KH, N, d]"""
    values: Tensor
    weights: Tensor
    """[L, H, N, N]"""
    queries: Tensor
    """Before RoPE, [L, H, N, d]."""
    frequencies: Tensor
    """Of RoPE, [d/2]."""

    @classmethod
    def of(cls, model: Any, prompt: Tensor) -> "FullCache":
        projected = list[Tensor]()
        hooks = [
            layer.self_attn.q_proj.register_forward_hook(lambda *given: projected.append(given[2]))
            for layer in model.model.layers
        ]
        full = model(prompt, output_attentions=True, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        layers = full.past_key_values.layers
        keys, values = (
            torch.cat([getattr(one, of) for one in layers]) for of in ("keys", "values")
        )
        queries = torch.cat(projected).unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2)
        return cls(
            keys, values, torch.cat(full.attentions), queries, model.model.rotary_emb.inv_freq
        )

    def expected(self) -> Tensor:
        """Expected attention to each token, [L, KH, N]."""
        rotation = mean_rotation(self.frequencies, self.keys.shape[2])
        counted, scale = self.queries[:, :, FIRST_TOKENS:], self.keys.shape[-1] ** -0.5
        covariances = [torch.stack([one.T.cov(correction=0) for one in of]) for of in counted]
        given = zip(counted.mean(2), covariances, self.keys, self.values.norm(dim=-1), strict=True)
        return torch.stack(
            [expected_attention(*layer, rotation=rotation, scale=scale) for layer in given]
        )


def kept_by_rule(full: FullCache, name: str, keep: float) -> Tensor:
    """The same for our rule."""
    score, budget, queries = RULES[name]
    layers, kv_heads, tokens, _ = full.keys.shape
    counted = full.weights[:, :, -queries:] if queries else full.weights
    sums = counted.sum(2).unflatten(1, (kv_heads, -1)).mean(2)
    prompt = ObservedPrompt(
        tokens=tokens,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=full.expected() if score == "expected" else sums,
        of_keys=lambda score: torch.stack([score(layer) for layer in full.keys]),
        kept=round(tokens * keep),
    )
    return BUDGETS[budget](SCORES[score](prompt), prompt)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--keep", default="0.5,0.25")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = pydoc_data.topics.topics["typesseq"]
    prompt = torch.tensor([tokenizer(text)["input_ids"][: options.tokens]])
    load = AutoModelForCausalLM.from_pretrained
    eager = load(options.model, dtype=torch.float32, attn_implementation="eager").eval()
    full = FullCache.of(eager, prompt)
    del eager
    model = load(options.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    rows = list[dict[str, object]]()
    for keep in map(float, options.keep.split(",")):
        for name in PRESSES:
            ours = kept_by_rule(full, name, keep)
            theirs = kept_by_press(model, prompt, name, keep)
            same = int((ours & theirs).sum())
            rows.append(
                {
                    "method": name,
                    "keep_share": keep,
                    "kept": int(ours.sum()),
                    "kept_by_kvpress": int(theirs.sum()),
                    "same": round(same / int(theirs.sum()), 5),
                }
            )
            print(rows[-1], flush=True)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    if options.json:
        body = {"tokens": prompt.shape[1], "versions": versions, "rows": rows}
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
