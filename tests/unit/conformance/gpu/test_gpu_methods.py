"""On a GPU each method stores the tokens that it stores on a CPU, and answers alike."""

from pathlib import Path

import pytest
import torch

from tests.unit.conformance.rows import METHODS_TO_TEST, compress, settings_of, stored
from tests.unit.conformance.test_conformance import requests
from tests.unit.workers.decode.test_resume import Stages
from triptych.workers.device import Device


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
