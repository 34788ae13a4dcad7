"""Image chats on a running server: accuracy by method, repeated images, batches, and stages.

    python -m benchmarks.serving.image_chats accuracy --json benchmarks/results/image_methods.json
    python -m benchmarks.serving.image_chats repeats --json benchmarks/results/image_repeats.json
    python -m benchmarks.serving.image_chats batches --json benchmarks/results/image_batches.json
    python -m benchmarks.serving.image_chats stages --json benchmarks/results/image_stages.json

``accuracy`` serves the model of ``examples/vision`` and asks about held-out pictures. ``repeats``
and ``batches`` also have a tower of the size of SigLIP-B/16 with random weights, since time does
not depend on weights: each image again with other text before it, so that only its features are
cached, and with another question behind it; and images encoded eight at a time, next to one by one.
``stages`` keeps the large tower busy with new images, encoded by workers of their own or by those
of prefill, in turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from PIL import Image as Pillow
from transformers import LlavaForConditionalGeneration, SiglipVisionConfig

from benchmarks.serving.server import serving
from examples.vision.ask import WITHOUT, Row, data_uri, measure
from examples.vision.checkpoint import (
    IMAGE_TOKENS,
    VISION_FILE,
    assemble,
    language_model,
    new_model,
    processor,
)
from triptych.cli.output import console, make_table, write_json
from triptych.core.images import Image
from triptych.loadgen.report.host import host_info
from triptych.workers.models.vision.vision_tower import VisionTower

DEFAULT = "uniform:k8v4"
FULL = "uniform:fp16"
"""Keeps everything in 16 bits: the others are compared with it."""
PRECISIONS = (FULL, DEFAULT, "uniform:k4v2", "uniform:k4v1")
RETENTION = ("uniform:k8v4/tova", "uniform:k8v4/snapkv", "uniform:k8v4/knorm")
"""Methods that keep a share of the image tokens."""
MERGED = "uniform:k8v4/learned:merge"
"""The method whose network makes one of k image tokens."""
NETWORKS = tuple(VISION_FILE.with_name(f"merger{tokens}.safetensors") for tokens in (2, 5))
BASE = SiglipVisionConfig(vision_use_head=False, image_size=224, patch_size=16)
"""86 million parameters, 196 tokens of an image."""
BATCH = 8
LARGE = "SigLIP-B/16 at 224, random weights"
IMAGES, CLIENTS, ANSWER_TOKENS = 3, 8, 16
"""Of ``stages``: images of a chat, chats at a time, and tokens of an answer."""
WINDOW_TOKENS = 8
"""Newest tokens about which no method decides: prompts have 55."""

Rows = list[dict[str, object]]


def accuracy(asked: argparse.Namespace, folder: Path) -> Rows:
    """Right answers, and what they cost, by method.

    After each network come rules that keep as many tokens of an image as are left behind it.
    """
    model, rows = assemble(folder / "model"), list[dict[str, object]]()

    def add(methods: Sequence[str], learned: Sequence[Path] = (), share: float = 1.0) -> Row:
        found = list(answers(model, methods, learned, share, asked, folder))
        for row in found:
            keeps = row.method in (MERGED, *RETENTION)
            rows.append({"image_keep_share": share, "keeps_a_share": keeps, **asdict(row)})
            console.print(rows[-1])
        return found[1]

    add(PRECISIONS)
    for network in asked.networks:
        merged = add((FULL, MERGED), [network])
        share = round(merged.image_tokens / IMAGE_TOKENS, 4)
        rows[-2]["image_keep_share"] = share
        add((FULL, *RETENTION), share=share)
    count = len(PRECISIONS) + 1
    return [*rows[:count], *(row for row in rows[count:] if row["method"] not in (FULL, WITHOUT))]


def answers(
    model: Path,
    methods: Sequence[str],
    learned: Sequence[Path],
    share: float,
    asked: argparse.Namespace,
    folder: Path,
) -> Iterator[Row]:
    """Ask a server of its own; the first method is what others are compared with."""
    compressor = {
        "policy": DEFAULT,
        "methods": [one for one in methods if one != DEFAULT],
        "learned": list(map(str, learned)),
        "image_keep_share": share,
        "recent_window_tokens": WINDOW_TOKENS,
        "high_window_tokens": WINDOW_TOKENS,
    }
    with serving(args_of(model, compressor), asked.port, folder) as server:
        yield from measure(server.url, methods, asked.pictures)


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
                new.append(ttft_s(server.url, "", image, question=f"first of {number}"))
                known.append(ttft_s(server.url, f"{number} again: ", image))
                after.append(ttft_s(server.url, "", image, question=f"second of {number}"))
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


def stages(asked: argparse.Namespace, folder: Path) -> Rows:
    """Encode workers of their own next to prefill workers that encode, at saturation.

    Each server answers chats with ``IMAGES`` new images, ``CLIENTS`` at a time.
    """
    model, rows = models(folder)[LARGE], list[dict[str, object]]()
    for number in range(2 * asked.rounds):
        worker = ("own", "prefill")[number % 2]
        more = {"encode": {"worker": worker}, "decode": {"max_num_seqs": CLIENTS}}
        with serving(args_of(model, {}) | more, asked.port, folder) as server:
            ttft_s(server.url, "warm up", picture(0))
            seeds = range(10_000 * number, 10_000 * number + CLIENTS * asked.requests)
            began = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as clients:
                found = list(clients.map(lambda seed, url=server.url: one_chat(url, seed), seeds))
            seconds = time.perf_counter() - began
        rows.append(
            {
                "encode_worker": worker,
                "stages": 4 if worker == "own" else 3,
                "requests": len(found),
                "requests_per_s": round(len(found) / seconds, 3),
                "mean_ttft_s": round(statistics.mean(found), 3),
                "p90_ttft_s": round(statistics.quantiles(found, n=10)[-1], 3),
            }
        )
        console.print(rows[-1])
    return rows


def one_chat(url: str, seed: int) -> float:
    """TTFT of a chat with new images."""
    images = [picture(seed * IMAGES + number) for number in range(IMAGES)]
    return ttft_s(url, "Look at these: ", *images, tokens=ANSWER_TOKENS)


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
    return {"examples/vision": small, LARGE: large}


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


def ttft_s(
    url: str, text: str, *images: Pillow.Image, question: str = "What is it?", tokens: int = 2
) -> float:
    """Seconds to the first token of a chat with a text, images, and a question.

    Returns when the answer of ``tokens`` tokens has ended.
    """
    pictures = [{"type": "image_url", "image_url": {"url": data_uri(one)}} for one in images]
    parts = [
        *([{"type": "text", "text": text}] if text else []),
        *pictures,
        {"type": "text", "text": question},
    ]
    body = {
        "model": "vision",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    began, found = time.perf_counter(), 0.0
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not found and line.startswith("data: {") and has_token(line):
                found = time.perf_counter() - began
    if not found:
        raise RuntimeError("no token")
    return found


def has_token(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: ")).get("choices", [])
    return any("content" in one["delta"] and "role" not in one["delta"] for one in choices)


def cpu_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


RUNS = {"accuracy": accuracy, "repeats": repeats, "batches": batches, "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(RUNS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--pictures", type=int, default=30)
    parser.add_argument("--requests", type=int, default=10, help="of each client of ``stages``")
    parser.add_argument("--rounds", type=int, default=2, help="of ``stages``")
    parser.add_argument("--networks", type=Path, nargs="+", default=NETWORKS)
    asked = parser.parse_args()
    run = RUNS[asked.what]
    with tempfile.TemporaryDirectory() as folder:
        rows = run(asked, Path(folder))
    console.print(make_table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    if asked.json:
        write_json({"host": host_info(), "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
