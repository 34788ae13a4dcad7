"""Which tokens stay high, go low or are dropped, and where each goes within its class."""

from triptych.kernels.compact import reference, retire
from triptych.kernels.compact.mass import mass_limits
from triptych.kernels.compact.retire import Retirement
from triptych.kernels.op import Op

__all__ = ["Retirement", "mass_limits", "plan_retirement", "plan_tokens"]

plan_tokens = Op(
    name="plan_tokens",
    spec=reference.plan_tokens,
    fast={
        # A few passes of torch over 4 bytes a token: nothing beside the encoding that follows.
        "cpu": "triptych.kernels.compact.reference:plan_tokens",
        "cuda": "triptych.kernels.compact.gpu:plan_tokens",
    },
)

plan_retirement = Op(
    name="plan_retirement",
    spec=retire.plan_retirement,
    fast={
        "cpu": "triptych.kernels.compact.cpu:plan_retirement",
        "cuda": "triptych.kernels.compact.gpu:plan_retirement",
    },
)
