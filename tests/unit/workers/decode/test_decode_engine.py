"""One decode step on pages, without a model."""

import numpy as np
import torch

from triptych.core.layout import FORMATS, Geometry, PageLayout
from triptych.kernels.pages import segments
from triptych.workers.decode.decode_attention import NewTokens, PageAttention, TokenScores
from triptych.workers.device import CPU
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages

RAW = PageLayout(FORMATS["fp16"], head_dim=32, page_bytes=1792)
GEOMETRY = Geometry(layers=1, kv_heads=2, head_dim=32)


def test_scores_are_updated_by_position_whatever_else_is_in_the_batch() -> None:
    """Of requests at positions 7, 8 and 12, every fourth token looks at 8 and 12."""
    arena = torch.zeros(6, RAW.page_bytes, dtype=torch.uint8)
    pages = np.arange(6, dtype=np.int32).reshape(1, 3, 2, 1)
    table = SectionTable(RAW, pages, np.zeros((1, 3, 2), np.int32))
    slots, positions = np.arange(3, dtype=np.int32), np.array([7, 8, 12], np.int32)
    progress = np.zeros(3, np.int64)
    memory, sections = DevicePages(CPU, arena, arena), Sections([table], CPU)
    token_scores = TokenScores(memory, sections, None, 4, progress)
    new = NewTokens.count(table, slots, positions, 4, progress)
    step = PageAttention(memory, sections, new, token_scores)
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    mixed = step(0, query, key, value, scale=0.2, window=0, softcap=0.0)
    assert torch.allclose(mixed, value.repeat_interleave(2, 1), atol=2e-3)
    scores = segments(arena, RAW).scores.view(3, 2, -1)
    assert torch.allclose(scores[:, :, 0], torch.tensor([[0.0], [4.0], [4.0]]).expand(3, 2))
    assert not scores[:, :, 1:].any()
    assert progress.tolist() == [0, 9, 13]
    table.tokens[:] = 0  # the step is done again, as it is when its worker died
    new = NewTokens.count(table, slots, positions, 4, progress)
    PageAttention(memory, sections, new, token_scores)(
        0, query, key, value, scale=0.2, window=0, softcap=0.0
    )
    assert torch.allclose(scores[:, :, 0], torch.tensor([[0.0], [4.0], [4.0]]).expand(3, 2))
