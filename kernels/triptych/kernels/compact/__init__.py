"""Ops that assign tokens to high, low or dropped, and plan the place of each in its class."""

from triptych.kernels.compact import evict, mass, reference, retire
from triptych.kernels.compact.mass import mass_limits
from triptych.kernels.compact.retire import Retirement
from triptych.kernels.op import Op

__all__ = [
    "Retirement",
    "mass_limits",
    "plan_eviction",
    "plan_retirement",
    "plan_tokens",
    "stored_mass_limits",
]

plan_tokens = Op(
    name="plan_tokens",
    spec=reference.plan_tokens,
    fast={
        # A few torch passes over 4 bytes a token take far less time than the encoding after them.
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

plan_eviction = Op(
    name="plan_eviction",
    spec=evict.plan_eviction,
    fast={
        "cpu": "triptych.kernels.compact.evict_rows:plan_eviction",
        "cuda": "triptych.kernels.compact.evict_rows:plan_eviction",
    },
)

stored_mass_limits = Op(
    name="stored_mass_limits",
    spec=mass.stored_mass_limits,
    fast={
        "cpu": "triptych.kernels.compact.cpu:stored_mass_limits",
        "cuda": "triptych.kernels.compact.mass:gathered_mass_limits",
    },
)
