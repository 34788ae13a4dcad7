"""On a GPU each method stores the tokens that it stores on a CPU, and answers alike."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.unit.conformance.rows import METHODS_TO_TEST, compress, settings_of, stored
from tests.unit.conformance.test_conformance import requests
from tests.unit.workers.decode.test_resume import Stages
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.device import Device
from triptych.workers.local import LocalServer


@pytest.mark.parametrize("method", METHODS_TO_TEST)
def test_a_gpu_stores_the_same_tokens_in_the_same_classes(
    tiny_model: Path, device: Device, method: str
) -> None:
    asked = requests((31, 64))
    host = Stages.of(tiny_model, settings_of(method, tiny_model))
    there = Stages.of(tiny_model, settings_of(method, tiny_model), device=device)
    pairs = zip(compress(host, asked), compress(there, asked), strict=True)
    for (_, mine), (_, theirs) in pairs:
        for first, second in zip(stored(host, mine), stored(there, theirs), strict=True):
            assert first[0] == second[0]
            assert torch.equal(first[3], second[3])
            off = (first[1] - second[1]).abs()
            assert (off > 2e-2).sum() <= 0.02 * off.numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the fake device counts")
@pytest.mark.parametrize("method", METHODS_TO_TEST)
def test_the_host_waits_once_a_decode_step_and_once_a_phase_of_retirement(
    tiny_model: Path, quick_device: Device, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the tokens. A page that leaves the window is moved in two phases, and each is recorded
    for a takeover when the device has done it."""
    from tests.far import WAIT  # noqa: PLC0415 - there is none beside a GPU

    waits, step = list[int](), DecodeEngine.step
    asked: list[str] = quick_device.asked  # type: ignore[attr-defined]

    def stepping(engine: DecodeEngine) -> Iterator[object]:
        start = len(asked)
        sends = list(step(engine))
        waits.append(asked[start:].count(WAIT))
        return iter(sends)

    monkeypatch.setattr(DecodeEngine, "step", stepping)
    settings = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 8 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": settings_of(method, tiny_model),
        }
    )
    greedy = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[5 + (7 * i + at) % 200 for at in range(20 + 21 * i)] for i in range(3)]
    with LocalServer(settings, tiny_model, device=quick_device) as server:
        done = server.complete([server.request(prompt, greedy) for prompt in prompts])
    assert [one.error for one in done] == [None] * 3
    assert len(waits) >= 23
    assert median(waits) == 1, waits
    assert max(waits) <= 3, waits
