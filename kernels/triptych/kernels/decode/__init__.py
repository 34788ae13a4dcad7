"""Ops of decode: attention of one token per request over compressed pages, and token scores."""

from triptych.kernels.decode import reference, rotated
from triptych.kernels.op import Op

decode_attention = Op(
    name="decode_attention",
    spec=reference.decode_attention,
    fast={
        "cpu": "triptych.kernels.decode.cpu:decode_attention",
        "cuda": "triptych.kernels.decode.gpu:decode_attention",
    },
)

attend_rotated = Op(
    name="attend_rotated",
    spec=rotated.attend_rotated,
    fast={
        "cpu": "triptych.kernels.decode.rotated:attend_rotated_cpu",
        "cuda": "triptych.kernels.decode.gpu:attend_rotated",
    },
)

score_tokens = Op(
    name="score_tokens",
    spec=reference.score_tokens,
    fast={
        "cpu": "triptych.kernels.decode.cpu:score_tokens",
        "cuda": "triptych.kernels.decode.gpu:score_tokens",
    },
)

record_scores = Op(
    name="record_scores",
    spec=reference.record_scores,
    fast={
        "cpu": "triptych.kernels.decode.cpu:record_scores",
        "cuda": "triptych.kernels.decode.gpu:record_scores",
    },
)
