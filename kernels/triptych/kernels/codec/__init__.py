"""Ops that encode tokens into pages, re-encode them in another format, and decode them."""

from triptych.kernels.codec import reference
from triptych.kernels.op import Op

NUMERICS_VERSION = 1
"""Increase it when any codec gives other bytes: pages on disk outlive the program."""

store_tokens = Op(
    name="store_tokens",
    spec=reference.store_tokens,
    fast={
        "cpu": "triptych.kernels.codec.cpu:store_tokens",
        "cuda": "triptych.kernels.codec.gpu:store_tokens",
    },
)

append_tokens = Op(
    name="append_tokens",
    spec=reference.append_tokens,
    fast={
        "cpu": "triptych.kernels.codec.cpu:append_tokens",
        "cuda": "triptych.kernels.codec.gpu:append_tokens",
    },
)

transcode = Op(
    name="transcode",
    spec=reference.transcode,
    fast={
        "cpu": "triptych.kernels.codec.cpu:transcode",
        "cuda": "triptych.kernels.codec.gpu:transcode",
    },
)

move_tokens = Op(
    name="move_tokens",
    spec=reference.move_tokens,
    fast={
        "cpu": "triptych.kernels.codec.cpu:move_tokens",
        "cuda": "triptych.kernels.codec.gpu:move_tokens",
    },
)

load_tokens = Op(
    name="load_tokens",
    spec=reference.load_tokens,
    fast={
        "cpu": "triptych.kernels.codec.cpu:load_tokens",
        "cuda": "triptych.kernels.codec.gpu:load_tokens",
    },
)

round_tokens = Op(
    name="round_tokens",
    spec=reference.round_tokens,
    fast={
        "cpu": "triptych.kernels.codec.cpu:round_tokens",
        "cuda": "triptych.kernels.codec.gpu:round_tokens",
    },
)
