"""Tensor operations on pages of keys and values: codecs, attention, classification, selection.

Each operation is an ``Op``. A call runs the implementation for the device of its tensors;
``op.on("reference")`` is the readable definition in torch.
"""

from typing import Any

from triptych.kernels.codec import (
    NUMERICS_VERSION,
    append_tokens,
    load_tokens,
    move_tokens,
    round_tokens,
    store_tokens,
    transcode,
)
from triptych.kernels.codegen.native import (
    multiplies_bfloat,
    multiplies_bytes,
    multiplies_tiles,
    multiplies_words,
)
from triptych.kernels.compact import (
    Retirement,
    mass_limits,
    plan_eviction,
    plan_retirement,
    plan_tokens,
    stored_mass_limits,
)
from triptych.kernels.decode import (
    attend_rotated,
    decode_attention,
    record_scores,
    score_tokens,
)
from triptych.kernels.dense.blocked_product import BlockedProduct, in_pieces
from triptych.kernels.dense.register_product import RegisterProduct
from triptych.kernels.draw import draw_tokens
from triptych.kernels.int4 import Int4Tiles, add_norm_multiply_int4, multiply_int4
from triptych.kernels.int8 import (
    DotProduct,
    Int8Product,
    QuantizedRows,
    add_norm_quantize,
    quantize_rows,
)
from triptych.kernels.logits import recompute_largest
from triptych.kernels.op import Op, observe_ops
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Past, Section
from triptych.kernels.pointwise import (
    add_norm,
    gate,
    rms_norm,
    rotate,
    rotate_back,
    rotate_kv,
)
from triptych.kernels.prefill import (
    ALWAYS_HIGH,
    largest_sums,
    mean_sums,
    prefill_attention,
    significance_of,
    sums_of_heads,
)
from triptych.kernels.select import Rule, Summaries, select_pages, summarize_pages

__all__ = [
    "ALWAYS_HIGH",
    "NUMERICS_VERSION",
    "OPS",
    "BlockedProduct",
    "DotProduct",
    "Int4Tiles",
    "Int8Product",
    "Op",
    "PageLists",
    "Past",
    "QuantizedRows",
    "RegisterProduct",
    "Retirement",
    "Rule",
    "Section",
    "Summaries",
    "add_norm",
    "add_norm_multiply_int4",
    "add_norm_quantize",
    "append_tokens",
    "attend_rotated",
    "decode_attention",
    "draw_tokens",
    "gate",
    "in_pieces",
    "largest_sums",
    "load_tokens",
    "mass_limits",
    "mean_sums",
    "move_tokens",
    "multiplies_bfloat",
    "multiplies_bytes",
    "multiplies_tiles",
    "multiplies_words",
    "multiply_int4",
    "observe_ops",
    "plan_eviction",
    "plan_retirement",
    "plan_tokens",
    "prefill_attention",
    "quantize_rows",
    "recompute_largest",
    "record_scores",
    "rms_norm",
    "rotate",
    "rotate_back",
    "rotate_kv",
    "round_tokens",
    "score_tokens",
    "select_pages",
    "significance_of",
    "store_tokens",
    "stored_mass_limits",
    "summarize_pages",
    "sums_of_heads",
    "transcode",
]

OPS: dict[str, Op[..., Any]] = {
    op.name: op
    for op in (
        store_tokens,
        append_tokens,
        transcode,
        move_tokens,
        load_tokens,
        round_tokens,
        prefill_attention,
        plan_tokens,
        plan_retirement,
        plan_eviction,
        stored_mass_limits,
        decode_attention,
        attend_rotated,
        score_tokens,
        record_scores,
        summarize_pages,
        select_pages,
        rms_norm,
        add_norm,
        rotate,
        rotate_kv,
        rotate_back,
        gate,
        multiply_int4,
        add_norm_multiply_int4,
        quantize_rows,
        add_norm_quantize,
        recompute_largest,
        draw_tokens,
    )
}
"""All operations by name; tests and benchmarks iterate over them."""
