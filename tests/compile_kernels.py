"""Compile the kernels for CPUs once, for all processes of tests.

Importing the module of a kernel compiles it and keeps the machine code on disk. Where there is
none, as in a new clone, processes that start together would each compile all kernels.
"""

from triptych.kernels import OPS

for op in OPS.values():
    if "cpu" in op.fast:
        op.on("cpu")
