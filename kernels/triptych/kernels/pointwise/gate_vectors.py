# pyright: basic
# llvmlite is untyped.
"""The gate of an MLP in vector registers."""

LOG2_E = 1.4426950408889634
MOST_POWER = 126.0


def gate_vector(emitter, opened, numbers):
    """``silu`` of the first vector of floats, times the second."""
    build = emitter.build
    power = build.fmul(opened, emitter.constant(-LOG2_E, opened))
    most = emitter.constant(MOST_POWER, opened)
    power = build.select(build.fcmp_ordered("<", power, most), power, most)
    below = build.fadd(emitter.exp2(power), emitter.constant(1.0, opened))
    return build.fmul(build.fmul(opened, emitter.inverse(below)), numbers)
