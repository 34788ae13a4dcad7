# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Intel's tile registers (AMX): eight tiles of up to 16 rows of 64 bytes.

What loads, multiplies and stores tiles is compiled only where ``native.multiplies_tiles``: LLVM
cannot compile it for other processors. ``use_tiles`` and ``end_tiles`` do nothing there. Between
them a thread calls nothing that has tiles of its own.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from triptych.kernels.codegen.native import multiplies_tiles
from triptych.kernels.codegen.simd import I8, POINTER, Emitter

ROWS = 16
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
CONFIG_BYTES = 64
TILES = 8
_PALETTE = 1


def tile_config(rows: int, first: int, count: int) -> np.ndarray:
    """Shapes for ``use_tiles``: 16 rows a tile, but ``rows`` in ``count`` tiles from ``first``."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = _PALETTE
    config[16 : 16 + 2 * TILES].view(np.uint16)[:] = ROW_BYTES
    config[48 : 48 + TILES] = ROWS
    config[48 + first : 48 + first + count] = rows
    return config


def zero_tile(emitter: Emitter, tile: int) -> None:
    _call(emitter, "llvm.x86.tilezero", I8(tile))


def load_tile(emitter, tile, pointer, stride):
    """Load rows that lie ``stride`` bytes apart."""
    _call(emitter, "llvm.x86.tileloadd64", I8(tile), pointer, stride)


def store_tile(emitter, tile, pointer, stride):
    _call(emitter, "llvm.x86.tilestored64", I8(tile), pointer, stride)


def add_bfloat_products(emitter: Emitter, sums: int, left: int, right: int) -> None:
    """Add the product of two tiles of bfloat16 to a tile of float32.

    Row r of ``right`` has inputs 2r and 2r + 1 of each of 16 results, next to each other.
    """
    _call(emitter, "llvm.x86.tdpbf16ps", I8(sums), I8(left), I8(right))


def _call(emitter, name, *arguments):
    kinds = tuple(argument.type for argument in arguments)
    emitter.build.call(emitter.declare(name, ir.VoidType(), kinds), list(arguments))


@intrinsic
def use_tiles(typing_context, config):
    """Give the tiles of this thread the shapes at an address; see ``tile_config``."""

    def emit(context, builder, signature, arguments):
        if multiplies_tiles():
            _call(Emitter(builder), "llvm.x86.ldtilecfg", builder.inttoptr(arguments[0], POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def end_tiles(typing_context):
    """Release the tiles of this thread."""

    def emit(context, builder, signature, arguments):
        if multiplies_tiles():
            _call(Emitter(builder), "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), emit
