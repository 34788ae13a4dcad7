"""Time whole steps of the three engines on a CPU or GPU, compared with ``transformers``.

    python benchmarks/engines.py --gpu --batch 1,8,32 --prompt 2048 --json FILE

The model has the shape of Llama and random weights, so nothing is downloaded. Prompts are random
tokens. All prompts of a batch are prefilled before decode is timed.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB, AppConfig
from triptych.core.messages import Sampling, Send
from triptych.core.pages import PagePlan
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe
from triptych.workers.prefill.prefill_engine import PrefillEngine

WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Row:
    """One way to keep keys and values, at one batch size."""

    how: str
    batch: int
    step_ms: float
    """Median of decode steps with the whole batch."""
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    kv_bytes_per_token: float
    """Page memory of a token of context, all layers, at the end of the answers."""


Steps = list[tuple[int, float]]
"""Requests that an engine had at each step, and seconds that it took."""


@contextmanager
def timing(engine: type[DecodeEngine | PrefillEngine]) -> Generator[Steps]:
    """Time all steps of a kind of engine."""
    steps, step = Steps(), engine.step

    def timed(one: Any) -> Iterable[Send]:
        batch, begun = len(one.requests()), time.perf_counter()
        sends = list(step(one))
        steps.append((batch, time.perf_counter() - begun))
        return sends

    with patch.object(engine, "step", timed):
        yield steps


def save_model(path: Path, layers: int, hidden: int, heads: int, kv_heads: int) -> Path:
    """Random weights in bfloat16, and a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131_072,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def prompts_of(batch: int, tokens: int) -> list[list[int]]:
    draw = random.Random(batch)
    return [[draw.randrange(2, 258) for _ in range(tokens)] for _ in range(batch)]


def measure(path: Path, policy: str, batch: int, prompt: int, answer: int, *, gpu: bool) -> Row:
    """The three engines."""
    settings: dict[str, object] = {
        "model": {"name": str(path), "max_model_len": prompt + answer},
        "compressor": {"policy": policy, "profile": "none"},
        "decode": {"max_num_seqs": batch, "actor": {"num_gpus": int(gpu)}},
    }
    plan = PagePlan.of(AppConfig.from_mapping(settings), describe(path).geometry)
    # Raw and encoded pages of all at once, and some to spare.
    pages = 2 * batch * plan.geometry.head_rows * (plan.raw.pages(prompt + answer) + 4)
    capacity = max(256 * MIB, pages * plan.page_bytes)
    settings["pool"] = {"kv_cache_memory_bytes": capacity, "prefix_bytes": 0}
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    with (
        LocalServer(AppConfig.from_mapping(settings)) as server,
        timing(DecodeEngine) as decode,
        timing(PrefillEngine) as prefill,
    ):
        asked = [server.request(one, sampling) for one in prompts_of(batch, prompt)]
        done = server.complete(asked)
    for one in done:
        if one.error is not None:
            raise SystemExit(one.error.message)
    whole = [seconds for count, seconds in decode if count == batch][WARM_UP_STEPS:]
    if not whole:
        raise SystemExit(
            f"--answer {answer}: the first of {batch} answers ended before the last prompt was "
            "read: ask for longer answers"
        )
    step = median(whole)
    stored = [one.report.stored_bytes for one in done if one.report is not None]
    return Row(
        how=policy,
        batch=batch,
        step_ms=step * 1e3,
        decode_tokens_per_s=batch / step,
        prefill_tokens_per_s=batch * prompt / sum(seconds for _, seconds in prefill),
        kv_bytes_per_token=sum(stored) / batch / prompt,
    )


def measure_transformers(path: Path, batch: int, prompt: int, answer: int, *, gpu: bool) -> Row:
    """``transformers`` with its own cache, step by step."""
    device = "cuda" if gpu else "cpu"
    options = {"dtype": torch.bfloat16, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(path, **options).to(device).eval()
    tokens = torch.tensor(prompts_of(batch, prompt), device=device)
    took, cache = list[float](), None
    with torch.inference_mode():
        for _ in range(answer):
            begun = time.perf_counter()
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            tokens.tolist()  # waits for the device
            took.append(time.perf_counter() - begun)
    step, config = median(took[1 + WARM_UP_STEPS :]), model.config
    head_bytes = config.hidden_size // config.num_attention_heads * 4
    return Row(
        how="transformers",
        batch=batch,
        step_ms=step * 1e3,
        decode_tokens_per_s=batch / step,
        prefill_tokens_per_s=batch * prompt / took[0],
        kv_bytes_per_token=config.num_hidden_layers * config.num_key_value_heads * head_bytes,
    )


def rows(asked: argparse.Namespace, path: Path) -> Iterator[Row]:
    for batch in map(int, asked.batch.split(",")):
        sizes = batch, asked.prompt, asked.answer
        yield measure_transformers(path, *sizes, gpu=asked.gpu)
        for policy in asked.policies.split(","):
            yield measure(path, policy, *sizes, gpu=asked.gpu)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time whole steps of the engines.")
    parser.add_argument("--gpu", action="store_true", help="compute on the GPU")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--policies", default="uniform:fp16,uniform:k8v4,uniform:k4v2")
    parser.add_argument("--layers", type=int, default=16, help="16 of 2,048: as Llama-3.2-1B")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args()


def main() -> None:
    asked, found = arguments(), list[Row]()
    shape = {name: getattr(asked, name) for name in ("layers", "hidden", "heads", "kv_heads")}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), **shape)
        for row in rows(asked, path):
            found.append(row)
            console.print(f"{row.how}, {row.batch} at once: {row.step_ms:.2f} ms a step")
    columns = ["how", "at once", "ms a step", "tokens/s", "prompt tokens/s", "KV bytes a token"]
    console.print(make_table(columns, map(cells, found), "Whole steps"))
    if asked.json:
        device = torch.cuda.get_device_name() if asked.gpu else "cpu"
        load = {"prompt": asked.prompt, "answer": asked.answer, "model": shape}
        written = [asdict(row) for row in found]
        write_json({"host": host_info(), "device": device, **load, "rows": written}, asked.json)


def cells(row: Row) -> list[str]:
    return [
        row.how,
        str(row.batch),
        f"{row.step_ms:.2f}",
        f"{row.decode_tokens_per_s:,.0f}",
        f"{row.prefill_tokens_per_s:,.0f}",
        f"{row.kv_bytes_per_token:,.0f}",
    ]


if __name__ == "__main__":
    main()
