"""A pool with arenas on devices: outputs, bytes between stages, and where pages lie."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.device_server import DeviceServer
from tests.fake_driver import FakeDriver
from tests.tiny import DIFFKV
from tests.unit.workers.gpu.conftest import IS_INTERPRETED
from triptych.core.config import AppConfig
from triptych.core.errors import StageLost
from triptych.core.messages import Encode, Message, Sampling, Stage
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import Link
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


ON_TWO: tuple[tuple[Stage, str], ...] = (
    ("prefill", "gpu-0"),
    ("prefill", "gpu-1"),
    ("compress", "gpu-0"),
    ("compress", "gpu-1"),
    ("decode", "gpu-2"),
)
"""Prompts can be computed on either of two devices, and decoded on a third one."""
CUT = [("gpu-0", "gpu-1"), ("gpu-0", "gpu-2"), ("gpu-1", "gpu-2")]
"""Pairs of devices without access to each other: all of them."""


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


def served(
    settings: dict[str, object], model: Path, folder: Path, device: Device,
    places: tuple[tuple[Stage, str], ...],
) -> tuple[list[Completion], Mapping[Stage, Counter[Link]], DeviceServer]:  # fmt: skip
    """Answers, traffic and the server, at the end, of devices that are apart."""
    driver = FakeDriver(folder, CUT)
    with DeviceServer(settings, model, folder, places, device, driver) as server:
        found = server.complete([server.request(prompt, GREEDY) for prompt in prompts()])
        assert server.server.stat().request_pages == 0
        assert server.server.check() == []
        return found, server.traffic(), server


@pytest.mark.parametrize("policy", ["diffkv", "uniform:k4v2"])
@pytest.mark.parametrize("places", [APART, ON_TWO], ids=["one", "two"])
def test_without_access_encoded_pages_alone_cross_the_bus_and_each_twice(
    tiny_model: Path,
    quick_device: Device,
    tmp_path: Path,
    policy: str,
    places: tuple[tuple[Stage, str], ...],
) -> None:
    settings = settings_of(policy)
    here = on_cpu(settings, tiny_model)
    there, traffic, server = served(settings, tiny_model, tmp_path, quick_device, places)
    assert [one.error for one in there] == [None] * len(LENGTHS)
    assert [one.tokens for one in there] == [one.tokens for one in here]
    assert [one.report for one in there] == [one.report for one in here]
    stored = sum(one.report.stored_bytes for one in there if one.report)
    assert traffic["prefill"]["bus"] == 0
    assert traffic["compress"]["own"] == traffic["prefill"]["own"] > 0
    assert traffic["compress"]["bus"] == stored
    assert traffic["decode"]["own"] == 0
    # Decode copies pages of slots that have no token yet too, and copies back what it writes.
    assert stored <= traffic["decode"]["bus"] < 2 * stored
    assert all(each["peer"] == 0 for each in traffic.values())
    readers = [one for one in server.workers.values() if one.stage == "prefill"]
    for one in readers:  # what it wrote was read on its device
        (beside,) = [
            each
            for each in server.workers.values()
            if each.stage == "compress" and each.device == one.device
        ]
        assert beside.traffic["own"] == one.traffic["own"] > 0


def test_without_a_compressor_on_their_device_raw_pages_are_in_host_memory(
    tiny_model: Path, quick_device: Device, tmp_path: Path
) -> None:
    settings = settings_of()
    here = on_cpu(settings, tiny_model)
    places: tuple[tuple[Stage, str], ...] = (
        ("prefill", "gpu-0"), ("compress", "gpu-1"), ("decode", "gpu-2"),
    )  # fmt: skip
    there, traffic, _ = served(settings, tiny_model, tmp_path, quick_device, places)
    assert [one.tokens for one in there] == [one.tokens for one in here]
    assert traffic["prefill"]["own"] == traffic["compress"]["own"] == 0
    stored = sum(one.report.stored_bytes for one in there if one.report)
    assert traffic["compress"]["bus"] == traffic["prefill"]["bus"] + stored


def test_pages_that_were_encoded_on_another_device_are_not_decoded_there(
    tiny_model: Path, quick_device: Device, tmp_path: Path
) -> None:
    """A router that knows a decode worker with the arena of the pool before has them encoded at the
    compressor's. Nothing of them stays, and the request ends as if the compressor had died."""
    settings, driver = settings_of(), FakeDriver(tmp_path)
    places = APART[:3]
    with DeviceServer(settings, tiny_model, tmp_path, places, quick_device, driver) as server:
        compress = next(one for one in server.workers.values() if one.stage == "compress")
        accept = compress.engines[0].accept

        def of_the_pool_before(message: Message) -> object:
            is_encode = isinstance(message, Encode)
            return accept(replace(message, arena="gone#gpu-1") if is_encode else message)

        compress.engines[0].accept = of_the_pool_before  # type: ignore[method-assign, assignment]
        answers = server.complete([server.request(prompt, GREEDY) for prompt in prompts()])
        codes = [one.error.code if one.error else "" for one in answers]
        assert codes == [StageLost.code] * len(LENGTHS)
        assert server.server.stat().request_pages == 0
        assert server.server.check() == []
