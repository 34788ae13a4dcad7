"""Which tokens stay high, go low or are dropped, and where each goes within its class."""

from triptych.kernels.compact import reference
from triptych.kernels.op import Op

plan_tokens = Op(
    name="plan_tokens",
    spec=reference.plan_tokens,
    fast={
        # A few passes of torch over 4 bytes a token: nothing beside the encoding that follows.
        "cpu": "triptych.kernels.compact.reference:plan_tokens",
        "cuda": "triptych.kernels.compact.gpu:plan_tokens",
    },
)
