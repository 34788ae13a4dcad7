"""Ops of page selection: summaries of pages, and a choice of pages by their scores."""

from triptych.kernels.op import Op
from triptych.kernels.page_lists import PageLists
from triptych.kernels.select import reference
from triptych.kernels.select.key_codes import KeyCodebooks
from triptych.kernels.select.summary import (
    KINDS,
    TILE_PAGES,
    WHOLE,
    Kind,
    Rule,
    Summaries,
    tile_bytes,
)

summarize_pages = Op(
    name="summarize_pages",
    spec=reference.summarize_pages,
    fast={
        "cpu": "triptych.kernels.select.cpu:summarize_pages",
        "cuda": "triptych.kernels.select.gpu:summarize_pages",
    },
)

select_pages = Op(
    name="select_pages",
    spec=reference.select_pages,
    fast={
        "cpu": "triptych.kernels.select.cpu:select_pages",
        "cuda": "triptych.kernels.select.gpu:select_pages",
    },
)

__all__ = [
    "KINDS",
    "TILE_PAGES",
    "WHOLE",
    "KeyCodebooks",
    "Kind",
    "PageLists",
    "Rule",
    "Summaries",
    "select_pages",
    "summarize_pages",
    "tile_bytes",
]
