"""Times steps of the engines and of ``transformers``, for ``benchmarks/kernels/engines.py``."""

import argparse
import random
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
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
from triptych.workers.device import Gpu
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe
from triptych.workers.prefill.prefill_engine import PrefillEngine

WARM_UP_STEPS = 4
PROFILED_STEPS = 8


@dataclass(frozen=True)
class Row:
    """One way to keep keys and values, at one batch size."""

    how: str
    batch: int
    graphs: bool
    """Whether decode steps are captured as graphs."""
    step_ms: float
    """Median of decode steps with the whole batch."""
    fastest_ms: float
    slowest_ms: float
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


@contextmanager
def profiled(batch: int) -> Generator[None]:
    """Show what the host and the device do in some decode steps with the whole batch."""
    step, seen = DecodeEngine.step, list[float]()
    profiler = torch.profiler.profile()

    def watched(one: DecodeEngine) -> Iterable[Send]:
        is_whole = len(one.requests()) == batch
        if is_whole and len(seen) == WARM_UP_STEPS:
            profiler.start()
        begun = time.perf_counter()
        sends = list(step(one))
        if is_whole:
            seen.append(time.perf_counter() - begun)
            if len(seen) == WARM_UP_STEPS + PROFILED_STEPS:
                profiler.stop()
        return sends

    with patch.object(DecodeEngine, "step", watched):
        yield
    if len(seen) < WARM_UP_STEPS + PROFILED_STEPS:
        raise SystemExit("--answer: too few steps to profile: ask for longer answers")
    table = profiler.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60
    )
    title = (
        f"{PROFILED_STEPS} steps of {batch} requests, {1e3 * median(seen[WARM_UP_STEPS:]):.2f} ms"
    )
    console.print(title, table, sep="\n", soft_wrap=True, markup=False, highlight=False)


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


def measure(asked: argparse.Namespace, path: Path, policy: str, batch: int, *, graphs: bool) -> Row:
    """The three engines."""
    prompt, answer, gpu = asked.prompt, asked.answer, asked.gpu
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
    sampling = Sampling(temperature=asked.temperature, max_tokens=answer, ignore_eos=True)
    with (
        LocalServer(AppConfig.from_mapping(settings)) as server,
        timing(DecodeEngine) as decode,
        timing(PrefillEngine) as prefill,
    ):
        requests = [server.request(one, sampling) for one in prompts_of(batch, prompt)]
        done = server.complete(requests)
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
        graphs=graphs and gpu,
        step_ms=step * 1e3,
        fastest_ms=min(whole) * 1e3,
        slowest_ms=max(whole) * 1e3,
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
    whole, config = took[1 + WARM_UP_STEPS :], model.config
    step = median(whole)
    head_bytes = config.hidden_size // config.num_attention_heads * 4
    return Row(
        how="transformers",
        batch=batch,
        graphs=False,
        step_ms=step * 1e3,
        fastest_ms=min(whole) * 1e3,
        slowest_ms=max(whole) * 1e3,
        decode_tokens_per_s=batch / step,
        prefill_tokens_per_s=batch * prompt / took[0],
        kv_bytes_per_token=config.num_hidden_layers * config.num_key_value_heads * head_bytes,
    )


def rows(asked: argparse.Namespace, path: Path) -> Iterator[Row]:
    for batch in map(int, asked.batch.split(",")):
        if not asked.only_ours:
            sizes = batch, asked.prompt, asked.answer
            yield measure_transformers(path, *sizes, gpu=asked.gpu)
        for policy, graphs in product(asked.policies.split(","), asked.graphs.split(",")):
            with ExitStack() as stack:
                stack.enter_context(patch.object(Gpu, "can_capture", graphs == "on"))
                if asked.profile:
                    stack.enter_context(profiled(batch))
                yield measure(asked, path, policy, batch, graphs=graphs == "on")


def run(asked: argparse.Namespace) -> None:
    """Measure what the arguments of ``benchmarks/kernels/engines.py`` ask for, and show it."""
    found = list[Row]()
    shape = {name: getattr(asked, name) for name in ("layers", "hidden", "heads", "kv_heads")}
    with tempfile.TemporaryDirectory() as folder:
        # A GPU draws random weights in a second.
        with torch.device("cuda" if asked.gpu else "cpu"):
            path = save_model(Path(folder), **shape)
        for row in rows(asked, path):
            found.append(row)
            console.print(f"{row.how}, {row.batch} at once: {row.step_ms:.2f} ms a step")
            save(asked, shape, found)
    columns = [
        "how",
        "at once",
        "graphs",
        "ms a step",
        "fastest",
        "slowest",
        "tokens/s",
        "prompt tokens/s",
        "KV bytes a token",
    ]
    console.print(make_table(columns, map(cells, found), "Whole steps"))


def save(asked: argparse.Namespace, shape: dict[str, int], found: list[Row]) -> None:
    """Write the rows so far, so that a run that is cut short has them."""
    if asked.json:
        device = torch.cuda.get_device_name() if asked.gpu else "cpu"
        load = {"prompt": asked.prompt, "answer": asked.answer, "model": shape}
        written = [asdict(row) for row in found]
        write_json({"host": host_info(), "device": device, **load, "rows": written}, asked.json)


def cells(row: Row) -> list[str]:
    return [
        row.how,
        str(row.batch),
        "yes" if row.graphs else "no",
        f"{row.step_ms:.2f}",
        f"{row.fastest_ms:.2f}",
        f"{row.slowest_ms:.2f}",
        f"{row.decode_tokens_per_s:,.0f}",
        f"{row.prefill_tokens_per_s:,.0f}",
        f"{row.kv_bytes_per_token:,.0f}",
    ]
