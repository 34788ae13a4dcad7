# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernels between the matrix products of a layer: norms, rotations, gated activation."""

import triton
import triton.language as tl


@triton.jit
def norm_rows(
    rows, by_token, by_head, delta, by_delta, weight, epsilon, total, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMS norm of one row, a head of a token; ``delta``, if given, is added to the row before.

    The sum is written to ``total``.
    """
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = rows + token * by_token + head * by_head + channel
    numbers = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        numbers += tl.load(delta + row * by_delta + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * WIDTH + channel, numbers, mask=inside)
    factor = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / WIDTH + epsilon)
    scales = tl.load(weight + channel, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + channel, numbers * factor * scales, mask=inside)


@triton.jit
def rotate_pairs(
    heads, by_token, by_head, cos, sin, by_angle, out,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """RoPE of a block of heads of one token; ``HALF``: half of the channels of a head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, WIDE)
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = heads + token * by_token + head.to(tl.int64)[:, None] * by_head + pair[None, :]
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * by_angle + pair, mask=pair < HALF, other=0.0)[None, :]
    sine = tl.load(sin + token * by_angle + pair, mask=pair < HALF, other=0.0)[None, :]
    to = out + (token * HEADS + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(to, left * cosine - right * sine, mask=inside)
    tl.store(to + HALF, right * cosine + left * sine, mask=inside)


@triton.jit
def gate_rows(gate_up, by_token, out, width, BLOCK: tl.constexpr):
    """``silu`` of a block of the first half of a row, times the same block of the second."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    at = gate_up + token * by_token + channel
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    gated = left / (1.0 + tl.exp(-left)) * right
    tl.store(out + token * width + channel, gated, mask=inside)


@triton.jit
def mixed_pairs(numbers, BLOCK: tl.constexpr, WIDE: tl.constexpr, SPAN: tl.constexpr):
    """Sum and difference of channels of [BLOCK, WIDE] that are ``SPAN`` apart, in their places."""
    pairs = tl.reshape(numbers, [BLOCK, WIDE // (2 * SPAN), 2, SPAN])
    first, second = tl.split(tl.permute(pairs, 0, 1, 3, 2))
    mixed = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(mixed, 0, 1, 3, 2), [BLOCK, WIDE])


@triton.jit
def mixed_channels(numbers, BLOCK: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr):
    """Hadamard transform of [BLOCK, WIDE] in blocks of ``2**STAGES`` channels, not normalised."""
    for stage in tl.static_range(STAGES):
        numbers = mixed_pairs(numbers, BLOCK, WIDE, 1 << stage)
    return numbers


@triton.jit
def mix_heads(
    heads, by_token, by_head, centre, out, block, factor, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hadamard rotation of one block of heads of a token, minus ``centre`` if it is given."""
    token = tl.program_id(0).to(tl.int64)
    head = block * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDE)
    inside = (head < HEADS)[:, None] & (channel < DIM)[None, :]
    at = heads + token * by_token + head.to(tl.int64)[:, None] * by_head + channel[None, :]
    numbers = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rotated = mixed_channels(numbers, BLOCK, WIDE, STAGES) * factor
    if centre is not None:
        at = centre + head[:, None] * DIM + channel[None, :]
        rotated -= tl.load(at, mask=inside, other=0.0)
    tl.store(out + (token * HEADS + head)[:, None] * DIM + channel[None, :], rotated, mask=inside)


@triton.jit
def rotate_all(
    query, query_token, query_head, key, key_token, key_head, value, value_token, value_head,
    centre, out_query, out_key, out_value, factor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hadamard rotation of the query, key and value of a token. Grid: tokens, blocks of heads."""
    block = tl.program_id(1)
    QUERIES: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    KEYS: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    if block < QUERIES:
        mix_heads(
            query, query_token, query_head, None, out_query, block, factor,
            HEADS, DIM, WIDE, STAGES, BLOCK,
        )  # fmt: skip
    elif block < QUERIES + KEYS:
        mix_heads(
            key, key_token, key_head, centre, out_key, block - QUERIES, factor,
            KV_HEADS, DIM, WIDE, STAGES, BLOCK,
        )  # fmt: skip
    else:
        mix_heads(
            value, value_token, value_head, None, out_value, block - QUERIES - KEYS, factor,
            KV_HEADS, DIM, WIDE, STAGES, BLOCK,
        )  # fmt: skip


@triton.jit
def rotate_outputs(
    heads, by_token, by_head, out, factor, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hadamard rotation of the attention output of a token. Grid: tokens, blocks of heads."""
    mix_heads(
        heads, by_token, by_head, None, out, tl.program_id(1), factor,
        HEADS, DIM, WIDE, STAGES, BLOCK,
    )  # fmt: skip
