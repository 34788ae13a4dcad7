"""Captured decode steps with the kernels of a GPU, of which some take minutes when interpreted."""

import random
from dataclasses import replace
from pathlib import Path

from tests.unit.workers.gpu.test_gpu_graphs import GREEDY, answers, config, counted, tokens_of
from triptych.workers.device import CPU, Device
from triptych.workers.local import Completion, LocalServer


def test_kernels_of_a_gpu_skip_rows_without_a_slot(tiny_model: Path, device: Device) -> None:
    """Three requests in a graph of four, with the kernels of a GPU."""
    settings = config("uniform:k8v4")
    with counted(device) as seen:
        there = answers(settings, tiny_model, device, count=3)
    assert seen["replays"] == seen["steps"]
    assert tokens_of(there) == tokens_of(answers(settings, tiny_model, CPU, count=3))


def test_requests_of_several_methods_replay_one_graph(tiny_model: Path, device: Device) -> None:
    """New tokens of 16-bit requests and of others go to different tables."""
    methods = ("", "uniform:fp16", "uniform:k8v4")
    settings = config("diffkv")
    settings = replace(settings, compressor=replace(settings.compressor, methods=methods[1:]))
    generator = random.Random(3)
    prompts = [[generator.randrange(2, 258) for _ in range(5 + 13 * i)] for i in range(6)]

    def ask(server: LocalServer) -> list[Completion]:
        asked = [server.request(prompt, GREEDY) for prompt in prompts]
        return server.complete([replace(one, method=methods[n % 3]) for n, one in enumerate(asked)])

    with counted(device) as seen, LocalServer(settings, tiny_model, device=device) as server:
        together = ask(server)
    with LocalServer(settings, tiny_model, device=CPU) as server:
        expected = ask(server)
    assert seen["replays"] == seen["steps"] > 0
    same = [a == b for a, b in zip(tokens_of(together), tokens_of(expected), strict=True)]
    assert sum(same) >= 5, "a random model may be torn between two tokens"
