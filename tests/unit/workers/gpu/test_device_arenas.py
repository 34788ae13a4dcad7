"""A pool with arenas on devices: outputs, bytes between stages, and where pages lie."""

import random
from pathlib import Path

import pytest

from tests.device_server import DeviceServer
from tests.fake_driver import FakeDriver
from tests.tiny import DIFFKV
from tests.unit.workers.gpu.conftest import IS_INTERPRETED
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling, Stage
from triptych.workers.device import CPU, Device
from triptych.workers.local import Completion, LocalServer

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="the driver is a fake one")

GREEDY = Sampling(temperature=0.0, max_tokens=18, ignore_eos=True)
LENGTHS = (3, 40, 90, 75)
APART: tuple[tuple[Stage, str], ...] = (
    ("prefill", "gpu-0"),
    ("compress", "gpu-0"),
    ("decode", "gpu-1"),
    ("decode", "gpu-2"),
)


def settings_of(policy: str = "diffkv", **pool: object) -> dict[str, object]:
    memory = {"kv_cache_memory_bytes": 4 << 20, "extent_pages": 16, "prefix_bytes": 0}
    return {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": memory | {"arena": "device"} | pool,
        "compressor": DIFFKV | {"policy": policy},
        "prefill": {"max_num_batched_tokens": 48},
    }


def prompts() -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(2, 258) for _ in range(count)] for count in LENGTHS]


def on_cpu(settings: dict[str, object], model: Path) -> list[Completion]:
    with LocalServer(AppConfig.from_mapping(settings), model, device=CPU) as server:
        return server.complete([server.request(prompt, GREEDY) for prompt in prompts()])


@pytest.mark.parametrize("policy", ["diffkv", "uniform:k8v4", "uniform:fp16"])
def test_answers_are_those_of_the_cpu_and_no_page_crosses_the_bus(
    tiny_model: Path, quick_device: Device, tmp_path: Path, policy: str
) -> None:
    settings, driver = settings_of(policy), FakeDriver(tmp_path)
    here = on_cpu(settings, tiny_model)
    with DeviceServer(settings, tiny_model, tmp_path, APART, quick_device, driver) as server:
        there = server.complete([server.request(prompt, GREEDY) for prompt in prompts()])
        traffic = server.traffic()
        assert server.server.stat().request_pages == 0
        assert server.server.check() == []
    assert [one.error for one in there] == [None] * len(LENGTHS)
    assert [one.tokens for one in there] == [one.tokens for one in here]
    assert [one.report for one in there] == [one.report for one in here]
    assert all(each["bus"] == 0 for each in traffic.values())
    assert traffic["prefill"]["peer"] == traffic["decode"]["peer"] == 0
    assert traffic["compress"]["own"] == traffic["prefill"]["own"]
    stored = sum(one.report.stored_bytes for one in there if one.report)
    assert traffic["compress"]["peer"] == stored
