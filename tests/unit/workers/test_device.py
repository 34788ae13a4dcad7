"""Which device a process computes on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import STAGES, Stage
from triptych.workers import factory
from triptych.workers.core_scheduler import DedicatedCores, SharedCores
from triptych.workers.device import CPU, device_for
from triptych.workers.factory import cores_for, device_of
from triptych.workers.local import LocalServer


def config(**gpus: float) -> AppConfig:
    actors = {stage: {"actor": {"num_gpus": count}} for stage, count in gpus.items()}
    return AppConfig.from_mapping({"model": {"name": "tiny"}} | actors)


def test_without_a_gpu_of_its_own_a_stage_computes_on_the_cpu() -> None:
    stages: tuple[tuple[Stage, ...], ...] = (("prefill",), ("compress",), ("decode",), STAGES)
    for one in stages:
        assert device_of(config(prefill=0.0), one) is CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_does_not_see_is_a_clear_error(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_gpus=0\.5, and torch .* sees no GPU: set it to 0"):
        device_for(0.5)
    with pytest.raises(ConfigError, match="num_gpus=1"):
        LocalServer(config(decode=1), tiny_model)


def test_pages_on_a_disk_are_not_for_gpus() -> None:
    settings = {"pool": {"arena_path": "/tmp/pages"}, "decode": {"actor": {"num_gpus": 1}}}
    with pytest.raises(ConfigError, match=r"pool\.arena_path.*num_gpus > 0 \(decode\)"):
        AppConfig.from_mapping(settings)


def test_on_the_cpu_everything_is_a_view() -> None:
    memory = np.zeros((2, 4), np.uint8)
    for tensor in (CPU.share(memory), CPU.put(memory)):
        memory[1, 2] += 1
        assert int(tensor[1, 2]) == int(memory[1, 2])


def test_stages_on_a_gpu_and_compressors_take_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    try:
        assert isinstance(cores_for(config(prefill=1.0), ("prefill",), tmp_path), DedicatedCores)
        assert torch.get_num_threads() == 1
        assert isinstance(cores_for(config(prefill=1.0), ("decode",), tmp_path), SharedCores)
        on_cpu = AppConfig()
        for cores, kind in ((1, SharedCores), (2, DedicatedCores)):
            monkeypatch.setattr(factory, "usable_cores", lambda cores=cores: cores)
            assert isinstance(cores_for(on_cpu, ("compress",), tmp_path), kind)
            assert isinstance(cores_for(on_cpu, ("prefill", "compress"), tmp_path), SharedCores)
    finally:
        torch.set_num_threads(threads)
