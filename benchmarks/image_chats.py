"""Image chats on a running server: accuracy by compression method, repeated images, and batches.

    python -m benchmarks.image_chats accuracy --json benchmarks/results/image_methods.json
    python -m benchmarks.image_chats repeats --json benchmarks/results/image_repeats.json
    python -m benchmarks.image_chats batches --json benchmarks/results/image_batches.json

``accuracy`` serves the model of ``examples/vision`` and asks about held-out pictures. ``repeats``
and ``batches`` also have a tower of the size of SigLIP-B/16 with random weights, since time does
not depend on weights: each image again with other text before it, so that only its features are
cached, and with another question behind it; and images encoded eight at a time, next to one by one.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from PIL import Image as Pillow
from transformers import LlavaForConditionalGeneration, SiglipVisionConfig

from benchmarks.server import serving
from examples.vision.ask import data_uri, measure
from examples.vision.checkpoint import VISION_FILE, assemble, language_model, new_model, processor
from triptych.cli.output import console, make_table, write_json
from triptych.core.images import Image
from triptych.loadgen.report.host import host_info
from triptych.workers.models.vision.vision_tower import VisionTower

DEFAULT = "uniform:k8v4"
PRECISIONS = ("uniform:fp16", DEFAULT, "uniform:k8v4/uniform:k4v2")
"""The first one keeps everything in 16 bits: the others are compared with it."""
RETENTION = ("uniform:k8v4/tova", "uniform:k8v4/snapkv", "uniform:k8v4/knorm")
"""Methods that keep a share of the image tokens."""
BASE = SiglipVisionConfig(vision_use_head=False, image_size=224, patch_size=16)
"""86 million parameters, 196 tokens of an image."""
BATCH = 8

Rows = list[dict[str, object]]


def accuracy(asked: argparse.Namespace, folder: Path) -> Rows:
    """Right answers, and what they cost, by method."""
    rows: Rows = []
    model = assemble(folder / "model")
    for share in asked.shares:
        compressor = {
            "policy": DEFAULT,
            "methods": [name for name in (*PRECISIONS, *RETENTION) if name != DEFAULT],
            "image_keep_share": share,
            "recent_window_tokens": 8,
        }
        others = PRECISIONS if share == asked.shares[0] else PRECISIONS[:1]
        methods = (*others, *RETENTION)
        with serving(args_of(model, compressor), asked.port, folder) as server:
            for row in measure(server.url, methods, asked.pictures):
                keeps = row.method in RETENTION
                rows.append({"image_keep_share": share, "keeps_a_share": keeps, **asdict(row)})
                console.print(rows[-1])
    return rows


def repeats(asked: argparse.Namespace, folder: Path) -> Rows:
    """TTFT of an image that is new; of one that was encoded before, behind other text; and of a
    second question about it, for which the beginning of the prompt is cached, too."""
    rows: Rows = []
    for name, model in models(folder).items():
        with serving(args_of(model, {}), asked.port, folder) as server:
            ttft_s(server.url, "warm up", picture(0))
            new, known, after = list[float](), list[float](), list[float]()
            for number in range(1, asked.requests + 1):
                image = picture(number)
                new.append(ttft_s(server.url, "", image, f"first of {number}"))
                known.append(ttft_s(server.url, f"{number} again: ", image))
                after.append(ttft_s(server.url, "", image, f"second of {number}"))
        new_ms, known_ms, after_ms = (
            round(1000 * statistics.median(some), 1) for some in (new, known, after)
        )
        rows.append(
            {
                "tower": name,
                "images": asked.requests,
                "new_ttft_ms": new_ms,
                "known_ttft_ms": known_ms,
                "ratio": round(new_ms / known_ms, 2),
                "known_beginning_ttft_ms": after_ms,
                "ratio_of_beginning": round(new_ms / after_ms, 2),
            }
        )
    return rows


@dataclass(frozen=True)
class BatchRow:
    """CPU time of one image, one by one and in a batch: the fastest of some calls, in turns."""

    tower: str
    batch: int
    single_ms: float
    batched_ms: float
    ratio: float


def batches(asked: argparse.Namespace, folder: Path) -> Rows:
    """Images encoded together, next to one by one, with one thread."""
    torch.set_num_threads(1)
    rows: Rows = []
    for name, model in models(folder).items():
        tower = VisionTower.read(model, "bfloat16", torch.device("cpu"))
        some = [as_image(picture(number)) for number in range(BATCH)]
        single, together = list[float](), list[float]()
        for _ in range(asked.requests):
            together.append(cpu_s(lambda tower=tower, some=some: tower.encode(some)))
            single.append(
                cpu_s(lambda tower=tower, some=some: [tower.encode([one]) for one in some])
            )
        one_ms, batch_ms = (1000 * min(found) / BATCH for found in (single, together))
        row = BatchRow(name, BATCH, round(one_ms, 2), round(batch_ms, 2), one_ms / batch_ms)
        rows.append(asdict(row))
    return rows


def models(folder: Path) -> dict[str, Path]:
    """The model of the example, and one with a tower of a usual size and random weights."""
    language, large = language_model(), folder / "large"
    small = folder / "small"
    if not small.exists():
        assemble(small, VISION_FILE)
        model: LlavaForConditionalGeneration = new_model(language, BASE)
        model.save_pretrained(large)
        processor(language, BASE).save_pretrained(large)
    return {"examples/vision": small, "SigLIP-B/16 at 224, random weights": large}


def args_of(model: Path, compressor: dict[str, object]) -> dict[str, object]:
    return {
        "model": {"name": str(model), "served_model_name": "vision"},
        "pool": {"kv_cache_memory_bytes": 256 << 20},
        "compressor": compressor,
    }


def picture(number: int) -> Pillow.Image:
    luck = np.random.default_rng(number)
    return Pillow.fromarray(luck.integers(0, 256, (96, 96, 3), dtype=np.uint8))


def as_image(given: Pillow.Image) -> Image:
    return Image.of(*given.size, given.tobytes())


def ttft_s(url: str, text: str, image: Pillow.Image, question: str = "What is it?") -> float:
    """Seconds to the first token of a chat with a text, an image, and a question."""
    parts = [
        *([{"type": "text", "text": text}] if text else []),
        {"type": "image_url", "image_url": {"url": data_uri(image)}},
        {"type": "text", "text": question},
    ]
    body = {
        "model": "vision",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and has_token(line):
                return time.perf_counter() - began
    raise RuntimeError("no token")


def has_token(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: ")).get("choices", [])
    return any("content" in one["delta"] and "role" not in one["delta"] for one in choices)


def cpu_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accuracy", "repeats", "batches"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--pictures", type=int, default=30)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.44, 0.2])
    asked = parser.parse_args()
    run = {"accuracy": accuracy, "repeats": repeats, "batches": batches}[asked.what]
    with tempfile.TemporaryDirectory() as folder:
        rows = run(asked, Path(folder))
    console.print(make_table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    if asked.json:
        write_json({"host": host_info(), "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
