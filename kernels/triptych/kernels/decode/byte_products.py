"""Products of queries and codes of keys in bytes: the arithmetic of ``gpu_bytes``, in torch.

What the tensor cores of a GPU add up as integers is added up as integers here, so that its error
can be measured where there is no GPU.
"""

import torch
from torch import Tensor

BASE = 254.0
LARGEST = 63.0
"""Factor of a query whose numbers are less than 2, so that its first digit fits in a byte."""
DIGITS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}
"""Digits of a query by its type."""


def query_digits(query: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` digits to the base 254 of each query, and the unit of the first.

    Digits are integers from -127 to 127. The unit is a power of two near the largest number of a
    query, over 63; digit i counts ``unit / 254**i``.

    Shapes:  query [..., d] -> [count, ..., d], [..., 1]
    Dtypes:  any float -> int32, float32
    Source:  integer attention as in SageAttention (Zhang et al., 2025), with exact queries
    """
    numbers = query.float()
    _, exponent = torch.frexp(numbers.abs().amax(-1, keepdim=True))
    power = torch.ldexp(torch.ones_like(numbers[..., :1]), exponent - 1)
    high = (numbers / power).half()
    low = (numbers / power - high.float()).half()
    rest = (high.float() + low.float()) * LARGEST
    digits = list[Tensor]()
    for _ in range(count):
        whole = rest.round()
        digits.append(whole.int())
        rest = (rest - whole) * BASE
    return torch.stack(digits), power / LARGEST


def byte_logits(query: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, count: int) -> Tensor:
    """Products of queries and keys ``scale * code + zero``, by digits of the queries.

    Integers are added up exactly. The sum of a query, by which zeros are multiplied, is that of
    its digits, so the logits are those of one query, which is rounded.

    Shapes:  query [..., M, d]; codes [..., N, d]; scale, zero [..., N] -> [..., M, N]
    Dtypes:  codes uint8; scale, zero any float; the result is float32
    """
    digits, unit = query_digits(query, count)
    logits, total = (torch.zeros((), device=query.device) for _ in range(2))
    for digit in digits:
        # float64 holds these integers exactly, and torch multiplies it fast.
        products = (digit.double() @ codes.double().mT).float()
        logits = logits + products * unit
        total = total + digit.sum(-1, keepdim=True).float() * unit
        unit = unit / BASE
    return logits * scale.float()[..., None, :] + total * zero.float()[..., None, :]
