"""Which share of a prompt's tokens is high, low or pruned, and the bytes that they take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from statistics import fmean

from triptych.core.handles import KVHandle
from triptych.core.pages import PagePlan
from triptych.evals.claims.draw import Draw
from triptych.evals.data.tasks import NOUNS
from triptych.evals.methods.method_names import parse_method
from triptych.evals.methods.served_engines import EngineMethod, compressed_prompts
from triptych.evals.metrics.footprint import of_handle
from triptych.evals.metrics.fragmentation import page_waste
from triptych.workers.compress.class_report import class_shares

METHODS = ("default", "default+alpha_low=0.1", "leankv")
PROSE = "pydoc@"
"""Beginning of the names of documents of prose; the others are code."""


def token_classes(draw: Draw) -> Mapping[str, float]:
    """By method and kind of text: shares of the classes, bytes, and what pages waste.

    A share is one of all tokens in all head rows; they add up to 1. Bytes are those of whole
    pages and tables, for a token of all head rows. The waste is the share of high and low pages
    that holds no token: in unified pages, and in pages of slots of one size.

    Source: DiffKV, figure 12 (shares by workload) and section 7.2 (memory follows the density of
            information); LeanKV, section 5.1 (fixed slots)
    """
    found = dict[str, float]()
    for name, kind, handles, plan in _compressed(draw):
        parts = [_figures(handle, plan) for handle in handles]
        for part in parts[0]:
            found[f"{name}, {kind}: {part}"] = fmean(one[part] for one in parts)
    return found


def _figures(handle: KVHandle, plan: PagePlan) -> Mapping[str, float]:
    waste = page_waste(handle, plan)
    return {
        **asdict(class_shares(handle, plan)),
        "bytes per token": of_handle(handle, plan).all_in_bytes / handle.tokens,
        "waste of unified pages": waste.unified_waste,
        "waste of fixed slots": waste.fixed_waste,
    }


def _compressed(draw: Draw) -> Iterator[tuple[str, str, Sequence[KVHandle], PagePlan]]:
    prompts = prompts_of(draw)
    every = [prompt for some in prompts.values() for prompt in some]
    for name in METHODS:
        method = parse_method(name, draw.model.path, draw.base, "float32")
        assert isinstance(method, EngineMethod)
        plan, handles = compressed_prompts(method.config, draw.model.path, every)
        left = iter(handles)
        for kind, some in prompts.items():
            yield name, kind, list(islice(left, len(some))), plan


def prompts_of(draw: Draw) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Prompts of ``context`` tokens by kind: texts of the split, and words that repeat."""
    texts = draw.texts
    line = draw.model.vocabulary.encode(" ".join(NOUNS[draw.seed % 3 :]) + ".\n")
    repeated = (line * (draw.context // len(line) + 1))[: draw.context]
    found = {
        "prose": [text.context for text in texts if text.name.startswith(PROSE)],
        "code": [text.context for text in texts if not text.name.startswith(PROSE)],
        "repetition": [tuple(repeated)],
    }
    return {kind: prompts for kind, prompts in found.items() if prompts}
