# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Fits thresholds of each head row: what ``alpha_high`` is multiplied with in each of them.

For each head row and each scale, the error of attention outputs and the bytes are measured. The
scales take the fewest bytes at the error that the same threshold for all rows has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.core.layout import PageFormat, page_format
from triptych.core.profile import Profile
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.captures import Capture, CapturePlan, capture_text
from triptych.evals.training.output_matching import attend, context_of
from triptych.kernels.codec.quantizer import decode, encode
from triptych.kernels.hadamard import hadamard
from triptych.workers.models.load import load
from triptych.workers.models.store.model_store import resolve

Unit = Literal["head", "layer"]
"""What has a threshold of its own: a KV head of a layer, or a layer."""
SCALES = (0.0, 0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)
"""Candidates; 1 is the threshold of the profile, 0 keeps all tokens high."""
SINK_TOKENS, HIGH_WINDOW_TOKENS = 3, 64
"""Tokens that have 8 bits or are high in any case, as in the server."""
BISECTIONS = 60
"""Steps in which the price of a byte is found."""


@dataclass(frozen=True, kw_only=True)
class ScalesPlan:
    """The texts on which head rows are measured."""

    unit: Unit = "head"
    context: int = 1024
    documents: int = 4
    steps: int = 128


@dataclass(frozen=True)
class ScaleCosts:
    """Error and bytes of each unit at each of ``SCALES``, summed over texts: [units, scales]."""

    errors: Tensor
    """Squared error of attention outputs over the square of the outputs of their layer."""
    sizes: Tensor
    """Bytes of codes and scales of tokens that can be high or low."""


def fit_alpha_scales(
    model: str, profile: Profile, plan: ScalesPlan, done: Callable[[], None]
) -> tuple[float, ...]:
    """Scales of all head rows for the thresholds and formats of a profile.

    ``done`` is called after each text.

    Raises: ConfigError if the texts are too short; ModelError for sliding windows or softcaps
    """
    path = resolve(model)
    texts = documents(
        Vocabulary(path).encode,
        "calibration",
        context=plan.context,
        continuation=plan.steps,
        count=plan.documents,
    )
    loaded = load(path, "float32", quantization="none")
    errors, sizes = list[Tensor](), list[Tensor]()
    for text in texts:
        shape = CapturePlan(context=plan.context, continuation=plan.steps)
        capture, _ = capture_text(loaded, (*text.context, *text.continuation), shape)
        error, size = costs_of(capture, profile)
        errors.append(error)
        sizes.append(size)
        done()
    error, size = torch.stack(errors).sum(0), torch.stack(sizes).sum(0)
    if plan.unit == "layer":
        error, size = error.sum(1, keepdim=True), size.sum(1, keepdim=True)
    chosen = cheapest_scales(ScaleCosts(error.flatten(0, 1), size.flatten(0, 1)))
    repeats = profile.geometry.kv_heads if plan.unit == "layer" else 1
    return tuple(SCALES[index] for index in chosen for _ in range(repeats))


@torch.inference_mode()
def costs_of(capture: Capture, profile: Profile) -> tuple[Tensor, Tensor]:
    """Error and bytes of each head row of a text at each scale: [L, KH, scales] twice."""
    settings, cache = profile.settings, context_of(capture)
    high, low = page_format(settings.high_format), page_format(settings.low_format)
    rounded = [_rounded(cache.keys, cache.values, form, profile) for form in (high, low)]
    layers, kv_heads, tokens, dim = cache.keys.shape
    full = capture.outputs.float()
    square = full.square().sum((1, 2, 3))[:, None]
    errors, sizes = list[Tensor](), list[Tensor]()
    for scale in SCALES:
        is_low = cache.significance < settings.alpha_high * scale / tokens
        is_low[..., :SINK_TOKENS] = False
        is_low[..., tokens - HIGH_WINDOW_TOKENS :] = False
        mixed = [
            torch.where(is_low[..., None], below, above)
            for above, below in zip(*rounded, strict=True)
        ]
        replaced = ReplacedCache(mixed[0], mixed[1], torch.zeros(layers, kv_heads, tokens))
        outputs, _ = attend(replaced, capture)
        wrong = (outputs - full).square().sum((2, 3)).unflatten(1, (kv_heads, -1)).sum(2)
        errors.append(wrong / square)
        count = is_low.sum(2)
        sizes.append((tokens - count) * high.read_bytes(dim) + count * low.read_bytes(dim))
    return torch.stack(errors, 2), torch.stack(sizes, 2)


def _rounded(
    keys: Tensor, values: Tensor, form: PageFormat, profile: Profile
) -> tuple[Tensor, Tensor]:
    """Keys and values as pages of a format return them, after rotation and centring.

    Shapes:  [L, KH, N, d], both and twice
    """
    turn, shape = hadamard(keys.shape[3]), keys.shape
    centre = torch.zeros(shape[0], shape[1], 1, shape[3])
    if profile.centre:
        packed = torch.frombuffer(bytearray(profile.centre), dtype=torch.float16)
        centre = packed.float().view(centre.shape)
    found = list[Tensor]()
    parts = (
        (keys - centre, form.key_bits, form.key_groups),
        (values, form.value_bits, form.value_groups),
    )
    for vectors, bits, groups in parts:
        flat = (vectors @ turn).reshape(-1, shape[3])
        kept = decode(encode(flat, bits, groups)) if form.is_quantized else flat.half().float()
        found.append(kept.view(shape) @ turn)
    return found[0] + centre, found[1]


def cheapest_scales(costs: ScaleCosts) -> list[int]:
    """For each unit the index of its scale: the fewest bytes at the error of one scale for all.

    Each unit takes the scale with the least error plus price times bytes, and the price of a byte
    is the largest at which the errors of all units together do not exceed that.
    """
    even = SCALES.index(1.0)
    allowed = float(costs.errors[:, even].sum())
    chosen = [even] * len(costs.errors)
    low, high = 0.0, float(costs.errors.max()) + 1.0
    for _ in range(BISECTIONS):
        price = (low + high) / 2
        found = (costs.errors + price * costs.sizes).argmin(1)
        error = float(costs.errors.gather(1, found[:, None]).sum())
        if error <= allowed:
            chosen, low = found.tolist(), price
        else:
            high = price
    return chosen
