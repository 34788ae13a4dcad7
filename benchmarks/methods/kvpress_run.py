"""Runs the cases of a study through kvpress, in kvpress's own environment.

    PYTHONPATH=evals /path/to/kvpress-env/bin/python benchmarks/methods/kvpress_run.py FOLDER \
        --presses knorm,snapkv --keep 0.3

FOLDER holds ``cases.json`` as ``kvpress_exchange.py`` writes it; each press adds
one file of records. kvpress 0.5.5 wants transformers below 5.3, so it cannot share ours. The
prompt is compressed, then forced tokens follow, as in kvpress's pipeline; each press is compared
with the full cache of the very model and environment that it runs in. ``--keep`` is the share of
tokens that stay, or a file with a share for each group of cases.

Bytes: the tokens that are kept, in 16 bits, as contiguous tensors without pages, tables or
positions. That favours kvpress: served, it would have them too.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from triptych.evals.metrics.fidelity import compare

PRESSES = {
    "knorm": kvpress.KnormPress,
    "snapkv": kvpress.SnapKVPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "streaming_llm": kvpress.StreamingLLMPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "tova": kvpress.TOVAPress,
    "keydiff": kvpress.KeyDiffPress,
    "observed_attention": kvpress.ObservedAttentionPress,
}
EAGER = {"observed_attention"}
"""Presses that read attention weights."""

Case = dict[str, Any]


def follow(
    model: PreTrainedModel, cache: DynamicCache, case: Case, last: Tensor
) -> tuple[Tensor | None, list[int]]:
    """Feed the forced tokens and answer greedily, at positions that count dropped tokens too.

    Shapes:  last [1, vocab], the logits after the prompt -> logits before forced[1:], tokens
    """
    position = len(case["prompt"])
    kept = None
    if case["forced"]:
        every = torch.cat(list(feed(model, cache, case["forced"], position)))
        kept, last = (every[:-1] if case["scored"] else None), every[-1:]
        position += len(case["forced"])
    tokens = list[int]()
    while len(tokens) < case["free_tokens"]:
        if tokens:
            last = next(feed(model, cache, tokens[-1:], position + len(tokens) - 1))
        tokens.append(int(last[-1].argmax()))
    return kept, tokens


def feed(
    model: PreTrainedModel, cache: DynamicCache, tokens: list[int], position: int
) -> Iterator[Tensor]:
    """Logits after each token; one by one if layers hold different numbers of tokens.

    The mask of several tokens is made for one length of the cache.
    """
    lengths = {layer.keys.shape[2] for layer in cache.layers}
    size = len(tokens) if len(lengths) == 1 else 1
    for start in range(0, len(tokens), size):
        part = torch.tensor([tokens[start : start + size]])
        positions = torch.arange(position + start, position + start + part.shape[1])[None]
        yield model(part, past_key_values=cache, position_ids=positions).logits[0]


def run(model: PreTrainedModel, case: Case, press: Any) -> tuple[Tensor | None, list[int], int]:
    """Logits, tokens, and bytes of what the press keeps of the prompt, in 16 bits."""
    cache = DynamicCache()
    with press(model) if press is not None else nullcontext():
        prompt = torch.tensor([case["prompt"]])
        last = model(prompt, past_key_values=cache, logits_to_keep=1).logits[0]
    kept_bytes = sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    logits, tokens = follow(model, cache, case, last)
    return logits, tokens, kept_bytes


def record(case: Case, full: Tensor | None, full_bytes: int, outcome: tuple[Any, ...]) -> Case:
    logits, tokens, kept_bytes = outcome
    scored = full is not None and logits is not None
    steps = compare(full, logits, case["forced"][1:]).as_json() if scored else None
    footprint = {
        "full_bytes": full_bytes,
        "data_bytes": kept_bytes,
        "all_in_bytes": kept_bytes,
    }
    return {"case": case["name"], "steps": steps, "tokens": tokens, "footprint": footprint}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--presses", default="knorm,snapkv,expected_attention,streaming_llm")
    parser.add_argument("--keep", required=True, help="a share, or a JSON file: group to share")
    parser.add_argument("--label", default="", help="behind each method's name")
    options = parser.parse_args()
    logging.disable_progress_bar()
    content = json.loads((options.folder / "cases.json").read_text(encoding="utf-8"))
    groups: list[dict[str, Any]] = content["groups"]
    path = Path(options.keep)
    keep = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".json"
        else {group["name"]: float(options.keep) for group in groups}
    )
    names = options.presses.split(",")
    kinds = {"eager" if name in EAGER else "sdpa" for name in names}
    models = {
        kind: AutoModelForCausalLM.from_pretrained(
            content["model"], dtype=torch.float32, attn_implementation=kind
        ).eval()
        for kind in kinds
    }
    results = {name: {group["name"]: list[Case]() for group in groups} for name in names}
    for group in groups:
        started = time.monotonic()
        for case in group["cases"]:
            full, _, full_bytes = run(next(iter(models.values())), case, None)
            for name in names:
                press = PRESSES[name](compression_ratio=1.0 - keep[group["name"]])
                outcome = run(models["eager" if name in EAGER else "sdpa"], case, press)
                results[name][group["name"]].append(record(case, full, full_bytes, outcome))
        seconds = time.monotonic() - started
        print(f"{group['name']}: {len(group['cases'])} cases, {seconds:.0f} s", flush=True)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    for name, records in results.items():
        body = {
            "method": f"kvpress:{name}{options.label}",
            "job": content["job"],
            "versions": versions,
            "keep": keep,
            "groups": records,
        }
        target = options.folder / f"kvpress-{name}{options.label}.json"
        target.write_text(json.dumps(body), encoding="utf-8")


if __name__ == "__main__":
    main()
