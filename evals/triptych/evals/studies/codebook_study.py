# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.flatten and others untyped in part.
"""Fits the codebooks of a model's keys, for ``decode.selection.method: a2ats``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.core.config import require
from triptych.evals.codecs.key_codebooks import KeyCodebooks, fit_codebooks
from triptych.evals.data.cases import Case
from triptych.evals.data.texts import documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import MaskedModel
from triptych.evals.methods.page_retrieval import LayerQueries
from triptych.kernels.select.key_codes import CENTROIDS
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.decode.codebook_file import CodebookRecord, write_codebooks

DISTANCE = 64
"""Tokens from queries to keys: the window that is read in any case."""
Books = dict[tuple[int, int], KeyCodebooks]
"""By layer and KV head."""


@dataclass(frozen=True, kw_only=True)
class CodebookStudy:
    """Texts of the calibration split to which codebooks are fitted."""

    context: int = 1024
    """Tokens of each."""
    documents: int = 3

    def __post_init__(self) -> None:
        require(self.context * self.documents >= CENTROIDS, "context", self.context, ">= 256")
        require(self.documents >= 1, "documents", self.documents, ">= 1")


class CodebookQueries:
    """Moments of queries at the distance of the window, and keys before RoPE, of some texts."""

    def __init__(self, frame: RopeFrame) -> None:
        self.frame = frame
        self.moments = dict[int, Tensor]()
        self.keys = dict[int, list[Tensor]]()

    def __call__(self, layer: int, queries: LayerQueries) -> None:
        far, keys = before_rope(self.frame, queries)
        far = far.flatten(1, 2)
        self.moments[layer] = self.moments.get(layer, 0.0) + far.mT @ far
        self.keys.setdefault(layer, []).append(keys)

    def fit(self, books: int) -> Books:
        """Codebooks of each head; ``books``: for parts of keys, so many."""
        return {
            (layer, head): fit_codebooks(keys, moment, books)
            for layer, parts in self.keys.items()
            for head, (keys, moment) in enumerate(
                zip(torch.cat(parts, 1), self.moments[layer], strict=True)
            )
        }


def before_rope(frame: RopeFrame, queries: LayerQueries) -> tuple[Tensor, Tensor]:
    """Queries at position ``DISTANCE`` [KH, G, T, d], and keys at position 0 [KH, n, d]."""
    count, tokens = queries.query.shape[2], queries.keys.shape[1]
    moved = DISTANCE - torch.arange(queries.first, queries.first + count)
    return (
        frame.rotate(queries.query, moved),
        frame.to_local(queries.keys, torch.arange(tokens)),
    )


def fit_key_codebooks(
    path: Path, study: CodebookStudy, output: Path, advance: Callable[[str], None]
) -> None:
    """Fit codebooks to texts and write them.

    ``advance`` is called after each text.

    Raises: ModelError for models whose RoPE or attention is not known
    Source: A2ATS (query-aware vector quantization, windowed RoPE)
    """
    model = MaskedModel(path)
    facts, frame = model.facts, RopeFrame.of(model.facts)
    recorded = CodebookQueries(frame)
    texts = documents(
        Vocabulary(path).encode,
        "calibration",
        context=study.context,
        continuation=1,
        count=study.documents,
    )
    for text in texts:
        case = Case(name="", prompt=text.context[:1], forced=text.context[1:], scored=True)
        model.run(case, recorded)
        advance(text.name)
    books, geometry = recorded.fit(1), facts.geometry
    shape = geometry.layers, geometry.kv_heads
    ordered = [books[layer, head] for layer in range(shape[0]) for head in range(shape[1])]
    centroids = torch.stack([book.centroids[0] @ book.inverse for book in ordered])
    moments = torch.stack([book.root @ book.root.mT for book in ordered])
    moments /= moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    record = CodebookRecord(
        weights=facts.weights,
        geometry=geometry,
        distance=DISTANCE,
        texts=text_hash("calibration"),
    )
    write_codebooks(
        output,
        record,
        centroids.unflatten(0, shape),
        moments.unflatten(0, shape),
        frame.frequencies,
    )
