"""Pages on a disk: the ones that a step reads are asked for, and answers are the same."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.unit.kvpool.pool.test_arena import forget
from tests.unit.workers.decode.test_page_selection import PROMPT
from triptych.core.config import AppConfig
from triptych.core.layout import FORMATS, PageLayout
from triptych.core.messages import Sampling
from triptych.kernels import PageLists
from triptych.kvpool import Arena
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.prefetch import Prefetcher, pages_read
from triptych.workers.local import LocalServer

Ids = NDArray[np.int32]


class AskedArena(Arena):
    """An arena that notes what is asked for."""

    asked: list[int]

    def will_need(self, ids: Ids) -> None:
        self.asked = sorted(ids.tolist())


def tables() -> list[SectionTable]:
    """Two sections of one layer, three slots and two heads; pages of 2 tokens."""
    layout = PageLayout(FORMATS["fp16"], 16, 256)
    assert layout.tokens == 3
    first = np.arange(2 * 3 * 4, dtype=np.int32).reshape(1, 3, 2, 4)
    counts = np.array([[[3, 4], [0, 12], [1, 1]]], np.int32)
    second = SectionTable(layout, first + np.int32(24), counts[..., ::-1].copy())
    return [SectionTable(layout, first, counts), second]


def test_pages_are_those_that_the_kernel_is_told_to_read() -> None:
    every = pages_read(tables(), 0, np.array([0, 1], np.int32), None)
    assert sorted(every.tolist()) == [0, 4, 5, 12, 13, 14, 15, 24, 25, 28, 32, 33, 34, 35]
    ordinals = torch.tensor([[[0, 2, 9], [1, 9, 9]]], dtype=torch.int32)
    lists = PageLists(ordinals, torch.tensor([[2, 1]]).int(), torch.tensor([-1, 0]).int())
    chosen = pages_read(tables(), 0, np.array([2, 1], np.int32), lists)
    # Slot 2 reads all; of slot 1 head 0 has nothing in the first section and 4 pages in the second.
    assert sorted(chosen.tolist()) == [13, 16, 20, 32, 34, 40, 44]


def test_what_was_read_in_the_step_before_is_not_asked_for_again() -> None:
    arena = AskedArena.private(48, 256)
    prefetcher, slots = Prefetcher(arena, tables()), np.array([0], np.int32)
    lists = [
        PageLists(
            torch.tensor([[[place], [0]]]).int(), torch.ones(1, 2).int(), torch.zeros(1).int()
        )
        for place in (0, 1)
    ]
    asked = list[list[int]]()
    for chosen in (lists[0], lists[0], lists[1], lists[0], lists[0], lists[1]):
        prefetcher.begin_step()
        prefetcher.layer(0, slots, chosen)
        asked.append(arena.asked)
    assert asked == [[0, 4], [], [24], [0], [], [24]]
    arena.close()


@pytest.mark.parametrize("method", ["none", "moments"])
def test_answers_are_the_same_from_a_disk_that_forgets_after_each_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    expected = answer(tiny_model, method, "")
    original, steps = DecodeEngine.step, 0

    def step(engine: DecodeEngine) -> Any:
        nonlocal steps
        steps += 1
        (path,) = tmp_path.iterdir()
        forget(path)
        return original(engine)

    monkeypatch.setattr(DecodeEngine, "step", step)
    assert answer(tiny_model, method, str(tmp_path)) == expected
    assert steps >= 20
    assert not os.listdir(tmp_path)


def answer(model: Path, method: str, arena_path: str) -> list[int]:
    selection = {"method": method, "keep_fraction": 0.3, "budget_tokens": 0}
    settings = AppConfig.from_mapping(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 20},
            "pool": {
                "kv_cache_memory_bytes": 16 << 20,
                "page_bytes": 4096,
                "prefix_bytes": 0,
                "arena_path": arena_path,
            },
            "decode": {"selection": selection},
        }
    )
    sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LocalServer(settings) as server:
        (done,) = server.complete([server.request(PROMPT, sampling)])
    assert done.error is None
    return done.tokens
