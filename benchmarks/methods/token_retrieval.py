# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.topk and others untyped in part.
"""A2ATS beside page selection: tokens or pages that each query reads, at equal bytes read.

A key is one byte or eight, codes of codebooks that are fitted to the calibration split (A2ATS).
Keys are coded before RoPE, and queries of all positions have the distance of the window
(windowed RoPE). Bytes are those of 16-bit keys and values that are read, and of codes or page
summaries; codebooks are not counted, in favour of A2ATS.

    python benchmarks/methods/token_retrieval.py --documents 2 --json token_retrieval.json
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.evals.data.cases import Case
from triptych.evals.data.texts import Document, documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import MaskedModel
from triptych.evals.methods.page_retrieval import LayerQueries, page_scores, visible_tokens
from triptych.evals.metrics.fidelity import compare
from triptych.evals.studies.codebook_study import Books, CodebookQueries, before_rope
from triptych.kernels.select import Rule
from triptych.kernels.select.summary import summary_bytes
from triptych.loadgen.report.host import host_info
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.models.store.model_store import resolve

PAGE, SINK, WINDOW, DENSE_LAYERS = 16, 4, 64, 2


@dataclass(frozen=True)
class Retrieval:
    """A ranking of tokens, or of pages of ``PAGE`` tokens, and its bytes for each token."""

    name: str
    token_bytes: float
    page_tokens: int
    books: Books | None = None
    """None: the ranking of that name in ``page_retrieval``."""


def rule(share: float) -> Rule:
    return Rule.of(share, 0, SINK, WINDOW, 0.0)


def scores_of(
    frame: RopeFrame, books: Books, layer: int, queries: LayerQueries, page_tokens: int
) -> Tensor:
    """Scores of tokens, or of the full pages by their best token, [KH, T, n or pages]."""
    far, keys = before_rope(frame, queries)
    found = torch.stack(
        [
            books[layer, head]
            .logits(far[head], books[layer, head].encode(keys[head]))
            .softmax(-1)  # shares of a group's queries, not logits, are comparable
            .amax(0)
            for head in range(len(keys))
        ]
    )
    full = keys.shape[1] // page_tokens
    return found[..., : full * page_tokens].unflatten(-1, (full, page_tokens)).amax(-1)


def measured(
    model: MaskedModel, frame: RopeFrame, one: Retrieval, share: float, texts: list[Document]
) -> dict[str, object]:
    """KL, top-1 agreement and the attention on what is read, at a share of the bytes."""
    geometry = model.facts.geometry
    dense = DENSE_LAYERS / geometry.layers
    kept = (share - dense) / (1 - dense) - one.token_bytes / (4 * geometry.head_dim)

    def mask(layer: int, queries: LayerQueries) -> Tensor | None:
        if layer < DENSE_LAYERS:
            return None
        scores = (
            page_scores(one.name, queries, PAGE)  # pyright: ignore[reportArgumentType]
            if one.books is None
            else scores_of(frame, one.books, layer, queries, one.page_tokens)
        )
        tokens = queries.keys.shape[1]
        return visible_tokens(scores, rule(kept), queries.first, tokens, one.page_tokens)

    kl, top1, hits = 0.0, 0.0, 0.0
    for text in texts:
        case = Case(name="", prompt=text.context, forced=text.continuation, scored=True)
        full, _, _ = model.run(case, lambda layer, queries: None)
        got, _, counts = model.run(case, mask)
        assert full is not None
        assert got is not None
        found = compare(full, got, text.continuation[1:])
        kl += float(found.kl.mean()) / len(texts)
        top1 += float(found.agree.mean()) / len(texts)
        hits += counts.hit_share / len(texts)
    row = {"name": one.name, "page_tokens": one.page_tokens, "share": share, "kept": kept}
    return {**row, "kl": kl, "top1": top1, "attention": hits}


def retrievals(model: MaskedModel, frame: RopeFrame, texts: list[Document]) -> Iterator[Retrieval]:
    recorded = CodebookQueries(frame)
    for text in texts:
        case = Case(name="", prompt=text.context[:1], forced=text.context[1:], scored=True)
        model.run(case, recorded)
    dim = model.facts.geometry.head_dim
    yield Retrieval("box", summary_bytes("box", dim) / PAGE, PAGE)
    yield Retrieval("moments", summary_bytes("moments", dim) / PAGE, PAGE)
    yield Retrieval("oracle", 0.0, PAGE)
    for books in (1, 8):
        fitted = recorded.fit(books)
        for page in (1, PAGE):
            yield Retrieval(f"a2ats, {books} B", books, page, fitted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--fit", type=int, default=3, help="texts of the calibration split")
    parser.add_argument("--shares", default="0.3", help="shares of the bytes that are read")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = resolve("smollm2-135m-instruct")
    model, encode = MaskedModel(path), Vocabulary(path).encode
    frame = RopeFrame.of(model.facts)
    known = documents(encode, "calibration", context=args.context, continuation=1, count=args.fit)
    texts = documents(
        encode,
        "evaluation",
        context=args.context,
        continuation=args.steps + 1,
        count=args.documents,
    )
    rows = list[dict[str, object]]()
    for one in retrievals(model, frame, known):
        for share in map(float, args.shares.split(",")):
            row = measured(model, frame, one, share, texts)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        parts = {"host": host_info(), "arguments": vars(args) | {"json": ""}, "rows": rows}
        args.json.write_text(json.dumps(parts, indent=1) + "\n")


if __name__ == "__main__":
    main()
