# pyright: basic
# numba is untyped.
"""Products with 4-bit weights of inputs that become integers of 8 bits."""

from functools import partial

from triptych.kernels.int4 import integer_product
from triptych.kernels.int4.integer_product import BYTES, multiply, prepare

__all__ = ["config_address", "input_words", "multiply", "prepare"]

input_words = partial(integer_product.input_words, BYTES)


def config_address(_rows: int) -> int:
    """How many bits inputs have: there are no tiles whose configuration has an address."""
    return BYTES
