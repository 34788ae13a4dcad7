"""Benchmarks that need a GPU say at once that there is none: before torch, which takes seconds."""

import sys

from triptych.kvpool.pool.cuda_driver import CudaDriver


def require_gpu(otherwise: str) -> None:
    """End the process with exit code 2 if the CUDA driver sees no GPU.

    ``otherwise``: what can be done without one.
    """
    if not CudaDriver().devices:
        lacks = "no GPU: CUDA has no driver here, or CUDA_VISIBLE_DEVICES hides all GPUs"
        print(f"{lacks} ({otherwise})", file=sys.stderr)
        sys.exit(2)
