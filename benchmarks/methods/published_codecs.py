# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Codecs of papers beside those of pages: KL and top-1 agreement of caches that are rounded.

The newest 16 tokens and the first one stay exact. Output tokens are not rounded, so figures are
lower than those of the server; they compare codecs with each other.

    python benchmarks/methods/published_codecs.py --documents 4 --json codecs.json
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from triptych.core.layout import FORMATS, KeySegment
from triptych.evals.codecs.layer_predictors import LayerPredictors, fit_predictors
from triptych.evals.codecs.pair_bits import bits_by_energy, mixed_bits, normed_codes, pair_energy
from triptych.evals.codecs.polar_keys import encode_polar
from triptych.evals.codecs.unbiased_values import encode_unbiased
from triptych.evals.data.texts import Document, documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import by_kv_head
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.metrics.fidelity import compare
from triptych.evals.studies.kv_bases import Moments, axes_of, energy, second_moment
from triptych.evals.studies.learned_study import continue_text
from triptych.kernels.codec.quantizer import (
    decode,
    encode,
    encode_segments,
    encode_values_by_norm,
    limit,
)
from triptych.kernels.hadamard import hadamard
from triptych.loadgen.report.host import host_info
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.facts import describe
from triptych.workers.models.kv_rotation import order_matrices
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.store.model_store import resolve

SINK, WINDOW, CONTEXT = 1, 16, 1024
KEY_LIMITED, VALUE_LIMITED = 2, 5
"""Numbers of a vector of 64 that OSCAR limits."""

Codec = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A round trip of the keys and values [L, KH, n, d] of a context."""


class Recorded(Moments):
    """Causal attention that keeps queries, keys and values, [KH, n, d] by layer."""

    def __init__(self, tokens: int) -> None:
        super().__init__([tokens])
        self.parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        queries = by_kv_head(query, key.shape[1]).flatten(1, 2)
        for kept, part in zip(
            self.parts, (queries, key.transpose(0, 1), value.transpose(0, 1)), strict=True
        ):
            kept.append(part)
        return super().__call__(layer, query, key, value, traits, sinks)


def record(loaded: LoadedModel, tokens: tuple[int, ...], wanted: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [L, KH, n, d], and logits from token ``wanted`` on."""
    found, places = Recorded(len(tokens)), torch.arange(len(tokens))
    logits = loaded.network(torch.tensor(tokens), places, found, places[wanted:])
    return (*(torch.stack(part) for part in found.parts), logits)


def rounded(vectors: Tensor, bits: int, limited: int = 0) -> Tensor:
    """Codes of a range, in Hadamard's coordinates."""
    turn = hadamard(vectors.shape[-1])
    flat = (vectors @ turn).flatten(0, -2)
    return decode(encode(limit(flat, limited), bits, 1)).view_as(vectors) @ turn


def unbiased(values: Tensor) -> Tensor:
    """Two-bit codes of the inner part of a range, in Hadamard's coordinates."""
    turn = hadamard(values.shape[-1])
    flat = (values @ turn).flatten(0, -2)
    return decode(encode_unbiased(flat, 2)).view_as(values) @ turn


def by_head(vectors: Tensor, trip: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    layers, heads = vectors.shape[:2]
    return torch.stack(
        [
            torch.stack([trip(layer, head, vectors[layer, head]) for head in range(heads)])
            for layer in range(layers)
        ]
    )


def in_axes(vectors: Tensor, axes: Tensor, bits: int, limited: int) -> Tensor:
    return rounded(vectors @ axes, bits, limited) @ axes.mT


def codecs(queries: Tensor, keys: Tensor, values: Tensor, frame: RopeFrame) -> dict[str, Codec]:
    """All codecs, fitted to the calibration split."""
    mean = keys.mean(2, keepdim=True)
    moment = second_moment(queries)
    of_keys, of_values = axes_of(moment), axes_of(second_moment(values, energy(keys, moment)))
    found = dict[str, Codec]()
    for bits, of_value in ((2, 2), (3, 2), (4, 2), (4, 4)):
        name, low = f"K{bits}V{of_value}", bits == 2
        found[f"range {name}"] = lambda k, v, b=bits, w=of_value: (
            rounded(k - mean, b) + mean,
            rounded(v, w),
        )
        if of_value == 2:
            found[f"range {name}, limited"] = lambda k, v, b=bits, n=KEY_LIMITED * low: (
                rounded(k - mean, b, n) + mean,
                rounded(v, 2, VALUE_LIMITED),
            )
            found[f"range {name}, unbiased values"] = lambda k, v, b=bits: (
                rounded(k - mean, b) + mean,
                unbiased(v),
            )
            found[f"oscar {name}"] = lambda k, v, b=bits, n=KEY_LIMITED * low: (
                in_axes(k - mean, of_keys, b, n) + mean,
                in_axes(v, of_values, 2, VALUE_LIMITED),
            )
    found |= dict(block_gtq(queries, keys, mean))
    found |= dict(served_block_gtq(queries, keys, mean))
    for radius, angle in ((2, 2), (3, 5), (4, 4), (4, 6)):
        found[f"spherical r{radius} a{angle} V2"] = lambda k, v, r=radius, a=angle: (
            encode_polar((k - mean).flatten(0, 2), r, a).decode().view_as(k) + mean,
            rounded(v, 2),
        )
    found |= dict(predicted(keys, values, frame))
    return found


def served_block_gtq(queries: Tensor, keys: Tensor, mean: Tensor) -> Iterator[tuple[str, Codec]]:
    """The codec of the method ``block_gtq``, and its sizes of segments with the levels of Lloyd
    and Max."""
    dim = keys.shape[-1]
    segments = FORMATS["block_gtq"].key_segments(dim)
    pairs = [torch.full((part.channels // 2,), part.bits) for part in segments]
    for label, centre in (("", torch.zeros_like(mean)), (", centred", mean)):
        energy_of = (pair_energy(queries) + pair_energy(keys - centre)) / 2
        order = energy_of.argsort(dim=-1, descending=True, stable=True)
        turn = order_matrices(order, dim)
        widths = torch.empty_like(order).scatter_(-1, order, torch.cat(pairs).expand_as(order))
        yield (
            f"block-gtq of fixed sizes K2V2{label}",
            lambda k, v, g=widths, c=centre: (
                by_head(k - c, lambda layer, head, x: mixed_bits(x, g[layer, head])) + c,
                by_head(v, lambda _layer, _head, x: normed_codes(x, 2)),
            ),
        )
        yield (
            f"block_gtq as served K2V2{label}",
            lambda k, v, m=turn, c=centre: (
                in_segments((k - c) @ m, segments) @ m.mT + c,
                by_norm(v, 2),
            ),
        )


def in_segments(keys: Tensor, segments: tuple[KeySegment, ...]) -> Tensor:
    return decode(encode_segments(keys.flatten(0, -2), segments)).view_as(keys)


def by_norm(values: Tensor, bits: int) -> Tensor:
    """Codes by norm, in Hadamard's coordinates."""
    turn = hadamard(values.shape[-1])
    flat = (values @ turn).flatten(0, -2)
    return decode(encode_values_by_norm(flat, bits)).view_as(values) @ turn


def block_gtq(queries: Tensor, keys: Tensor, mean: Tensor) -> Iterator[tuple[str, Codec]]:
    """Bits by pair, and the same number for all pairs, of keys as they are and centred."""
    for bits in (2, 3, 4):
        for label, centre in (("", torch.zeros_like(mean)), (", centred", mean)):
            spread = (pair_energy(queries) + pair_energy(keys - centre)) / 2
            chosen = bits_by_energy(spread, bits)
            for name, given in (
                ("block-gtq", chosen),
                ("turboquant", torch.full_like(chosen, bits)),
            ):
                yield (
                    f"{name} K{bits}V2{label}",
                    lambda k, v, g=given, c=centre: (
                        by_head(k - c, lambda layer, head, x: mixed_bits(x, g[layer, head])) + c,
                        by_head(v, lambda _layer, _head, x: normed_codes(x, 2)),
                    ),
                )


def predicted(keys: Tensor, values: Tensor, frame: RopeFrame) -> Iterator[tuple[str, Codec]]:
    """AQUA-KV: the rest behind a prediction from the layer before, in ranges."""
    places = torch.arange(keys.shape[2]) % CONTEXT
    kept = places > 0
    local = frame.to_local(keys, places)[:, :, kept]
    found = fit_predictors(local, values[:, :, kept])
    for bits, of_value in ((2, 2), (3, 2), (4, 2), (4, 4)):
        limits = (KEY_LIMITED * (bits == 2), VALUE_LIMITED * (of_value == 2))
        yield f"aqua-kv K{bits}V{of_value}", _predicting(found, frame, (bits, of_value), limits)


def _predicting(
    found: LayerPredictors, frame: RopeFrame, bits: tuple[int, int], limits: tuple[int, int]
) -> Codec:
    def trip(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(keys.shape[2])
        local, decoded = found.replace(
            frame.to_local(keys, places),
            values,
            lambda _, rest: rounded(rest, bits[0], limits[0]),
            lambda _, rest: rounded(rest, bits[1], limits[1]),
        )
        return frame.rotate(local, places), decoded

    return trip


def exact_ends(given: Tensor, coded: Tensor) -> Tensor:
    coded = coded.clone()
    coded[:, :, :SINK], coded[:, :, -WINDOW:] = given[:, :, :SINK], given[:, :, -WINDOW:]
    return coded


def measure(
    loaded: LoadedModel, texts: list[Document], every: dict[str, Codec]
) -> Iterator[dict[str, object]]:
    """KL and top-1 agreement of each codec, the mean over texts."""
    exact = [record(loaded, (*one.context, *one.continuation[:-1]), CONTEXT) for one in texts]
    for name, codec in every.items():
        steps = list[tuple[float, float]]()
        for text, (_, key, value, full) in zip(texts, exact, strict=True):
            given = key[:, :, :CONTEXT], value[:, :, :CONTEXT]
            keys, values = map(exact_ends, given, codec(*given))
            bias = torch.zeros(given[0].shape[:3])
            logits = continue_text(loaded, text, ReplacedCache(keys, values, bias))
            found = compare(full, logits, text.continuation[1:])
            steps.append((float(found.kl.mean()), float(found.agree.mean())))
        kl, top1 = (sum(part) / len(steps) for part in zip(*steps, strict=True))
        print(f"{name:32s} KL {kl:.4f} top-1 {top1:.3f}", flush=True)
        yield {"codec": name, "kl": kl, "top1_agreement": top1}


def main() -> None:
    """Print a line for each codec, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--split", choices=("evaluation", "test"), default="evaluation")
    parser.add_argument("--codecs", default="", help="Only those whose name matches this pattern.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = resolve(options.model)
    loaded, read = load(path, "float32", quantization="none"), Vocabulary(path).encode
    with torch.inference_mode():
        texts = documents(read, "calibration", context=CONTEXT, continuation=1, count=6)
        parts = zip(*(record(loaded, text.context, -1)[:3] for text in texts), strict=True)
        queries, keys, values = (torch.cat(part, 2) for part in parts)
        every = codecs(queries, keys, values, RopeFrame.of(describe(path)))
        every = {name: codec for name, codec in every.items() if re.search(options.codecs, name)}
        sizes = {"context": CONTEXT, "continuation": options.steps + 1}
        texts = documents(read, options.split, **sizes, count=options.documents)
        rows = list(measure(loaded, texts, every))
    if options.json:
        conditions = {key: str(value) for key, value in vars(options).items()}
        found = {"host": host_info(), "conditions": conditions, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
