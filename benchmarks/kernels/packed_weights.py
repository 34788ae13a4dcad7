"""Memory and time of weights in 4 bits, beside the same weights in bfloat16.

    python benchmarks/kernels/packed_weights.py --json benchmarks/results/packed_weights.json

The default model, which its file has in 4 bits, and a model of random weights with the shape of
Llama 3.2 1B. Each is loaded in processes of its own, in turns. A pass runs all layers and the head
for a number of rows; attention is left out.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from triptych.cli.output import console, make_table, write_json
from triptych.deployments.replicas.memory_tuning import give_back_free_memory
from triptych.loadgen.report.host import host_info
from triptych.workers.models.load import load
from triptych.workers.models.store.model_store import fetch

ROWS = (1, 4, 16, 64, 512)
KINDS = ("none", "int4")
LEAST_S = 1.0
"""Time of measuring each number of rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "QUANTIZATION"))
    asked = parser.parse_args(arguments)
    if asked.child:
        print(json.dumps(measure(Path(asked.child[0]), asked.child[1])))
        return
    with TemporaryDirectory() as folder:
        models = {"SmolLM2-135M": fetch("smollm2-135m-instruct"),
                  "1B, random": save_random(Path(folder) / "model")}  # fmt: skip
        rows = [row for name, path in models.items() for row in compare(name, path, asked.rounds)]
    memory = ("weights_mb", "process_mb", "files_mb")
    columns = ("model", "quantization", *memory, *(f"rows_{n}_ms" for n in ROWS))
    console.print(make_table(columns, [[row[key] for key in columns] for row in rows], "Weights"))
    if asked.json:
        write_json({"host": host_info(), "rows": rows}, asked.json)


def compare(name: str, path: Path, rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds, and each figure next to that of bfloat16."""
    found: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, "--child", str(path), kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind].append(json.loads(done.stdout))
    figures = {
        kind: {key: median(one[key] for one in many) for key in many[0]}
        for kind, many in found.items()
    }
    dense = figures[KINDS[0]]
    return [
        {"model": name, "quantization": kind, **mine}
        | {f"of_bfloat16_{key}": round(mine[key] / dense[key], 3) for key in mine}
        for kind, mine in figures.items()
    ]


def measure(path: Path, quantization: Any) -> dict[str, float]:
    """Memory of the process in MB, and milliseconds of a pass by its rows.

    Pages of mapped files, which the system shares between processes and drops when it needs
    memory, are counted apart: programs, and the rows that were read of the model's embedding.
    """
    torch.manual_seed(0)
    torch.set_num_threads(2)
    before = _status("RssAnon")
    model = load(path, "bfloat16", quantization=quantization)
    give_back_free_memory()
    network = model.network
    found = {"weights_mb": network.step_bytes / 1e6, "load_mb": _status("RssAnon") - before}
    with torch.inference_mode():
        for rows in ROWS:
            tokens = torch.randint(model.vocab_size, (rows,))
            last = torch.arange(max(0, rows - 64), rows)  # a prefill needs few logits
            times = list[float]()
            begun = time.perf_counter()
            while len(times) < 3 or time.perf_counter() - begun < LEAST_S:
                start = time.perf_counter()
                network(tokens, torch.arange(rows), without_attention, last)
                times.append(1e3 * (time.perf_counter() - start))
            found[f"rows_{rows}_ms"] = median(times)
    give_back_free_memory()
    return found | {"process_mb": _status("RssAnon"), "files_mb": _status("RssFile")}


def without_attention(_layer: int, query: Any, *_: object) -> Any:
    """Something of the right shape, for no time."""
    return query


def save_random(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.02, generator=generator)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((fetch("smollm2-135m-instruct") / name).read_bytes())
    return path


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
