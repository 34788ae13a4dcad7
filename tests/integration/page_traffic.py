"""Bytes of pages that cross the bus between stages, for a prompt with the KV shape of Llama-3.1-8B.

    python -m tests.integration.page_traffic --json benchmarks/results/page_traffic.json

The engines count them (``DevicePages.touch``): own memory, that of another device, or the bus. They
run on a fake device with the kernels of the CPU. Layers, KV heads and head size are those of
Llama-3.1-8B; all else is small, since pages do not depend on it. Decode steps are not counted.

Pages lie in arenas of two GPUs that access each other (``peers``), in host memory with copies for
decode (``host``), or raw ones on the GPU of prefill and compressor and others in host memory, with
copies for decode on a GPU without access to that one (``apart``), or for decode without a GPU
(``near``).
"""

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import device_server
from tests.device_server import DeviceServer
from tests.fake_driver import FakeDriver
from tests.far import FarDevice, quick_device
from tests.tiny import byte_tokenizer
from triptych.cli.output import console, make_table, write_json
from triptych.core.messages import Sampling, Stage
from triptych.loadgen.report.host import host_info
from triptych.workers.device import Device

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_ON = {"peers": "gpu-1", "host": "gpu-1", "apart": "gpu-1", "near": ""}
"""Device of the decode worker, by where pages lie."""
POLICIES: dict[str, dict[str, object]] = {
    "diffkv": {"policy": "diffkv"},
    "diffkv:mixed": {"policy": "diffkv", "alpha_high": 2.0},
    **{name: {"policy": name} for name in ("uniform:k8v4", "uniform:k4v2", "uniform:fp16")},
}
"""Settings of the compressor. Attention of random weights is so even that ``diffkv`` has all tokens
high; with this threshold a fifth of them is, as with the default's on SmolLM2."""
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
    model: Path, policy: str, tokens: int, device: Device, pages: str
) -> list[dict[str, object]]:
    """Bytes that each stage reports for one prompt; ``pages``: where they lie."""
    places: list[tuple[Stage, str]] = [("prefill", "gpu-0"), ("compress", "gpu-0")]
    places.append(("decode", DECODE_ON[pages]))
    settings: dict[str, object] = {
        "model": {"name": str(model), "dtype": "float32"},
        "pool": {
            "kv_cache_memory_bytes": POOL_BYTES,
            "prefix_bytes": 0,
            "arena": "host" if pages == "host" else "device",
        },
        "compressor": POLICIES[policy] | {"profile": "none"},
        "decode": {"max_num_seqs": 1},
    }
    prompt = [random.Random(1).randrange(2, 250) for _ in range(tokens)]
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    with TemporaryDirectory() as folder:
        cut = [("gpu-0", "gpu-1")] if pages == "apart" else []
        driver = None if pages == "host" else FakeDriver(Path(folder), cut)
        host_bytes = POOL_BYTES if pages == "near" else 1
        with DeviceServer(
            settings, model, Path(folder), places, device, driver, host_bytes
        ) as server:
            (done,) = server.complete([server.request(prompt, sampling)])
            assert done.error is None
            traffic = server.traffic()
    return [
        {"policy": policy, "pages": pages, "stage": stage, **{
            link: traffic[stage][link] for link in ("own", "peer", "bus")
        }}
        for stage, _ in places
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
        patch.setattr(device_server, "PATIENCE_S", 900.0)
        device = FarDevice(free_bytes=2 * POOL_BYTES)
        model = save_model(Path(folder), asked.layers, asked.tokens)
        for policy in asked.policies.split(","):
            for pages in DECODE_ON:
                rows += count(model, policy, asked.tokens, device, pages)
                console.print(f"{policy}, {pages}")
                if asked.json:
                    found = {"tokens": asked.tokens, "layers": asked.layers, "rows": rows}
                    write_json({"host": host, **found}, asked.json)
    console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows]))
    for policy, pages in dict.fromkeys((row["policy"], row["pages"]) for row in rows):
        crossed = sum(
            int(str(row["bus"])) for row in rows if (row["policy"], row["pages"]) == (policy, pages)
        )
        console.print(f"{policy}, {pages}: {crossed / 1e6:.0f} MB over the bus")


if __name__ == "__main__":
    main()
