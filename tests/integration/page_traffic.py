"""Bytes of pages that cross the bus between stages, for a prompt with the KV shape of Llama-3.1-8B.

    python -m tests.integration.page_traffic --json benchmarks/results/page_traffic.json

The engines count them (``DevicePages.touch``): own memory, that of another device, or the bus. They
run on a fake device with the kernels of the CPU. Layers, KV heads and head size are those of
Llama-3.1-8B; all else is small, since pages do not depend on it. Decode steps are not counted.
"""

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.device_server import DeviceServer
from tests.fake_driver import FakeDriver
from tests.far import FarDevice, quick_device
from tests.tiny import byte_tokenizer
from triptych.cli.output import console, make_table, write_json
from triptych.core.messages import Sampling, Stage
from triptych.loadgen.report.host import host_info
from triptych.workers.device import Device

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
PLACES: tuple[tuple[Stage, str], ...] = (
    ("prefill", "gpu-0"), ("compress", "gpu-0"), ("decode", "gpu-1"),
)  # fmt: skip
POLICIES = ("diffkv", "uniform:k8v4", "uniform:k4v2", "uniform:fp16")
POOL_BYTES = 1 << 30
SMALL = 64
"""Hidden size."""


def save_model(path: Path, layers: int, tokens: int) -> Path:
    """A model with these layers and random weights."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=SMALL,
        intermediate_size=SMALL,
        num_hidden_layers=layers,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2 * tokens,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def count(
    model: Path, policy: str, tokens: int, device: Device, *, on_devices: bool
) -> list[dict[str, object]]:
    """Bytes that each stage reports for one prompt."""
    settings: dict[str, object] = {
        "model": {"name": str(model), "dtype": "float32"},
        "pool": {
            "kv_cache_memory_bytes": POOL_BYTES,
            "prefix_bytes": 0,
            "arena": "device" if on_devices else "host",
        },
        "compressor": {"policy": policy, "profile": "none"},
        "decode": {"max_num_seqs": 1},
    }
    prompt = [random.Random(1).randrange(2, 250) for _ in range(tokens)]
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    with TemporaryDirectory() as folder:
        driver = FakeDriver(Path(folder)) if on_devices else None
        with DeviceServer(settings, model, Path(folder), PLACES, device, driver) as server:
            (done,) = server.complete([server.request(prompt, sampling)])
            assert done.error is None
            traffic = server.traffic()
    arena = "peers" if on_devices else "host"
    return [
        {"policy": policy, "pages": arena, "stage": stage, **{
            link: traffic[stage][link] for link in ("own", "peer", "bus")
        }}
        for stage, _ in PLACES
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    host, rows = host_info(), list[dict[str, object]]()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        quick_device(patch)  # the kernels
        device = FarDevice(free_bytes=2 * POOL_BYTES)
        model = save_model(Path(folder), asked.layers, asked.tokens)
        for policy in asked.policies.split(","):
            for on_devices in (True, False):
                rows += count(model, policy, asked.tokens, device, on_devices=on_devices)
    if asked.json:
        found = {"host": host, "tokens": asked.tokens, "layers": asked.layers, "rows": rows}
        write_json(found, asked.json)
    console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
