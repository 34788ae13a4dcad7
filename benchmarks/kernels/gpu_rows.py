"""Rows of ``benchmarks/kernels/gpu.py``: limits of a GPU, decode attention and page selection."""

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from gpu_ceilings import Ceiling, ceilings  # beside this file

from triptych.core.layout import KeyOrder
from triptych.kernels.bench import attention_gpu, selection
from triptych.kernels.bench.attention_cpu import build_case
from triptych.loadgen.report.host import host_info


def measure(asked: argparse.Namespace) -> None:
    """Measure the steps that are asked for; print each row, and write all so far."""
    found: dict[str, Any] = {
        "host": host_info(),
        "device": torch.cuda.get_device_name(),
        "ceilings": [],
        "rows": [],
        "selection": [],
    }
    measured = {
        "ceilings": ("ceilings", limits),
        "attention": ("rows", attention),
        "selection": ("selection", selected),
    }
    for step, (name, rows) in measured.items():
        for row in rows(asked) if step in asked.only else ():
            found[name].append(asdict(row))
            print(json.dumps(found[name][-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def limits(asked: argparse.Namespace) -> Iterator[Ceiling]:
    yield from ceilings(asked.repeats)


def attention(asked: argparse.Namespace) -> Iterator[attention_gpu.GpuRow]:
    formats, orders = asked.formats.split(","), asked.order
    queries, sizes = asked.dtype, (asked.batch, asked.context)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=spawn) as pool:
        made = [
            pool.submit(compile_case, name, order, query, *sizes)
            for name, order in attention_gpu.cases(formats, orders)
            for query in queries
        ]
        for future in made:
            future.result()
    yield from attention_gpu.run(
        formats, orders, queries, batch=asked.batch, context=asked.context, repeats=asked.repeats
    )


def compile_case(name: str, key_order: KeyOrder, query: str, batch: int, context: int) -> None:
    """Run a case once, which leaves its kernels in Triton's cache."""
    shape = attention_gpu.LAYER
    dtype = attention_gpu.DTYPES[query]
    asked = torch.randn(batch, shape.heads, shape.head_dim, device="cuda", dtype=dtype)
    build_case(shape, name, asked, context, key_order).attend("cuda")
    torch.cuda.synchronize()


def selected(asked: argparse.Namespace) -> Iterator[selection.SelectionRow]:
    batches, contexts = (
        [int(word) for word in words.split(",")]
        for words in (asked.selection_batch, asked.selection_context)
    )
    for batch, context in product(batches, contexts):
        yield from selection.run_selection(
            ("cuda",),
            batches=[batch],
            contexts=[context],
            shape=attention_gpu.LAYER,
            repeats=asked.repeats,
            device="cuda",
        )
