"""Acceptance test of a served model: tokens equal to ``transformers``, quality of compression.

    python benchmarks/serving/acceptance.py tokens --url http://127.0.0.1:8000 [--json FILE]
    python benchmarks/serving/acceptance.py quality [--policy uniform:k8v4] [--json FILE]

``tokens`` sends 32 prompts of 1 to 3,000 tokens at once, greedy, 64 tokens each, to a server that
computes in float32 with ``uniform:fp16`` pages. Each output token must be the most likely one of
``transformers`` after the same tokens. Otherwise the two top logits must differ by less than 1e-3,
and the case is listed. ``quality`` runs the same prompts teacher-forced through the three engines
in this process and compares each step's distribution with the full cache's.
"""

import argparse
import asyncio
import inspect
import json
import pydoc_data.topics
import random
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from triptych.core.config import AppConfig
from triptych.evals.metrics.teacher_forcing import teacher_forced_logits
from triptych.workers.models.store.model_store import resolve

MODEL = "smollm2-135m-instruct"
PROMPTS, LONGEST, ANSWER = 32, 3000, 64
NEAR_TIE = 1e-3


def texts() -> list[str]:
    """English technical prose and source code that ship with Python (PSF licence)."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 12_000]
    modules = [argparse, inspect, json, asyncio.base_events, random, httpx._client]
    return topics[:10] + [inspect.getsource(module) for module in modules]


def prompts(path: Path) -> list[list[int]]:
    """Thirty-two different prompts, their lengths spread evenly over the logarithm."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    sources = [tokenizer.encode(text) for text in texts()]
    lengths = [round(LONGEST ** (i / (PROMPTS - 1))) for i in range(PROMPTS)]
    made = list[list[int]]()
    for i, length in enumerate(lengths):
        source = next(
            s for s in sources[i % len(sources) :] + sources if len(s) >= length + ANSWER + i
        )
        made.append(source[i : i + length])
    return made


def continuations(path: Path, asked: list[list[int]]) -> list[list[int]]:
    """What the source texts say after each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    sources = [tokenizer.encode(text) for text in texts()]
    outputs = list[list[int]]()
    for i, prompt in enumerate(asked):
        source = next(
            s for s in sources[i % len(sources) :] + sources if len(s) >= len(prompt) + ANSWER + i
        )
        outputs.append(source[i + len(prompt) : i + len(prompt) + ANSWER])
    return outputs


def reference_logits(
    model: PreTrainedModel, prompt: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """Logits before each token of ``outputs``, [tokens, vocab], from one full-cache pass."""
    tokens = torch.tensor([[*prompt, *outputs[:-1]]])
    with torch.inference_mode():
        return model(tokens, logits_to_keep=len(outputs)).logits[0]


# ------------------------------------------------------------------ tokens


async def ask(url: str, asked: list[list[int]]) -> list[list[int]]:
    """All prompts at once through the HTTP endpoint; the ids of each answer."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await client.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]

    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=64)) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in asked))


def compare_tokens(url: str) -> dict[str, object]:
    path = resolve(MODEL)
    asked = prompts(path)
    started = time.monotonic()
    answers = asyncio.run(ask(url, asked))
    served_s = time.monotonic() - started
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    near_ties, wrong, alike = list[dict[str, object]](), list[dict[str, object]](), 0
    for number, (prompt, outputs) in enumerate(zip(asked, answers, strict=True)):
        with torch.inference_mode():
            alone = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                do_sample=False,
            )[0, len(prompt) :].tolist()
        alike += alone == outputs
        logits = reference_logits(model, prompt, outputs)
        for at in (logits.argmax(-1) != torch.tensor(outputs)).nonzero().ravel().tolist():
            top = logits[at].topk(2)
            gap = float(top.values[0] - logits[at, outputs[at]])
            case = {
                "prompt": number,
                "prompt_tokens": len(prompt),
                "at": at,
                "served": outputs[at],
                "transformers": int(top.indices[0]),
                "gap": gap,
            }
            (near_ties if gap < NEAR_TIE else wrong).append(case)
        print(
            f"prompt {number:2d}: {len(prompt):4d} tokens, same as generate: {alone == outputs}",
            flush=True,
        )
    return {
        "prompts": PROMPTS,
        "answer_tokens": ANSWER,
        "identical_answers": alike,
        "near_ties": near_ties,
        "wrong": wrong,
        "served_s": served_s,
    }


# ------------------------------------------------------------------ quality


def compare_quality(policy: str, dtype: str) -> dict[str, object]:
    path = resolve(MODEL)
    asked = prompts(path)
    outputs = continuations(path, asked)
    config = AppConfig.from_mapping(
        {"model": {"name": str(path), "dtype": dtype}, "compressor": {"policy": policy}}
    )
    ours = teacher_forced_logits(config, path, asked, outputs)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = list[dict[str, float]]()
    for prompt, tokens, steps in zip(asked, outputs, ours, strict=True):
        full = reference_logits(model, prompt, tokens).log_softmax(-1)
        compressed = torch.stack(steps).log_softmax(-1)
        kl = (full.exp() * (full - compressed)).sum(-1)
        agree = (full.argmax(-1) == compressed.argmax(-1)).float()
        rows.append({"tokens": len(prompt), "kl": float(kl.mean()), "top1": float(agree.mean())})
        print(
            "prompt of {tokens:4d} tokens: KL {kl:.5f}, top-1 agreement {top1:.3f}".format(
                **rows[-1]
            ),
            flush=True,
        )
    return {
        "policy": policy,
        "dtype": dtype,
        "kl_mean": sum(row["kl"] for row in rows) / len(rows),
        "top1_mean": sum(row["top1"] for row in rows) / len(rows),
        "prompts": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tokens", "quality"])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", default="uniform:k8v4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "tokens":
        result = compare_tokens(options.url)
    else:
        result = compare_quality(options.policy, options.dtype)
    print(json.dumps({k: v for k, v in result.items() if k != "prompts"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
