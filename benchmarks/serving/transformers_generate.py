"""The baseline: ``transformers`` generate, same weights, static batches, one process.

    python benchmarks/serving/transformers_generate.py --batch 1,4,16 --json FILE

In a static batch, all prompts have one length, start together and end together. Figures have the
names of ``triptych bench serve``.
"""

import argparse
import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.processes import tree_of, watch
from triptych.loadgen.report.sample import Chunk, Sample
from triptych.loadgen.report.stats import Slo, summarize
from triptych.loadgen.run import Run
from triptych.loadgen.workload.openai_requests import Workload
from triptych.workers.models.store.model_store import resolve


class Clock(StoppingCriteria):
    """Stops nothing; notes when each token of the batch was there."""

    def __init__(self) -> None:
        self.ticks = list[float]()

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.ticks.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@dataclass(frozen=True)
class Baseline:
    """A loaded model and what to ask of it."""

    model: PreTrainedModel
    workload: Workload

    def generate(self, batch: int, first: int) -> list[Sample]:
        """One static batch of prompts ``first``, ``first + 1`` and so on."""
        turns = [self.workload.turn(first + row) for row in range(batch)]
        prompts = [self.workload.body(turn)["prompt"] for turn in turns]
        ids, clock = torch.tensor(prompts), Clock()
        start = perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.workload.output_tokens,
            min_new_tokens=self.workload.output_tokens,
            stopping_criteria=[clock],
        )
        chunks, wrote = tuple(map(Chunk, clock.ticks)), out.shape[1] - ids.shape[1]
        return [Sample(start, perf_counter(), chunks, ids.shape[1], wrote) for _ in prompts]

    async def measure(self, batch: int, repeats: int) -> dict[str, object]:
        """A warm-up batch, then a row over ``repeats`` batches."""
        await asyncio.to_thread(self.generate, batch, 0)
        samples, start = list[Sample](), perf_counter()
        async with watch(tree_of(os.getpid())) as usage:
            for repeat in range(1, repeats + 1):
                samples += await asyncio.to_thread(self.generate, batch, repeat * batch)
        figures = summarize(Run(tuple(samples), perf_counter() - start), Slo())
        return {"max_concurrency": batch, "num_prompts": len(samples), **figures, **usage.figures()}


def load(name: str, dtype: str) -> PreTrainedModel:
    """The directory that Triptych serves, read by transformers' own loader."""
    path = resolve(name)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    workload = Workload(
        model=asked.model, prompt_tokens=asked.prompt_tokens, output_tokens=asked.output_tokens
    )
    host, baseline = host_info(), Baseline(load(asked.model, asked.dtype), workload)
    batches = [int(part) for part in asked.batch.split(",")]
    rows = [asyncio.run(baseline.measure(batch, asked.repeats)) for batch in batches]
    body = {"host": host, "dtype": asked.dtype, "threads": asked.threads, "rows": rows}
    asked.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
