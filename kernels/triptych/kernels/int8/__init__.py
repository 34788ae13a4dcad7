"""Products in 8 bits: rows are rotated and quantized as they come, weights once.

The ops before a product return ``QuantizedRows``, so that no pass only finds codes.
"""

from triptych.kernels.int8 import reference
from triptych.kernels.int8.dot_product import DotProduct
from triptych.kernels.int8.product import Int8Product
from triptych.kernels.int8.rows import QuantizedRows
from triptych.kernels.op import Op

__all__ = [
    "DotProduct",
    "Int8Product",
    "QuantizedRows",
    "add_norm_quantize",
    "quantize_rows",
]

quantize_rows = Op(
    name="quantize_rows",
    spec=reference.quantize_rows,
    fast={"cpu": "triptych.kernels.int8.cpu:quantize_rows"},
)

add_norm_quantize = Op(
    name="add_norm_quantize",
    spec=reference.add_norm_quantize,
    fast={"cpu": "triptych.kernels.int8.cpu:add_norm_quantize"},
)
