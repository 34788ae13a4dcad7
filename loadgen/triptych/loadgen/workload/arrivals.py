"""Arrival times of sessions: Poisson or bursty."""

import random

POISSON = 1.0
"""Gamma shape of a Poisson process."""


def arrivals_s(
    count: int, rate_per_s: float, seed: int | str, burstiness: float = POISSON
) -> list[float]:
    """Arrival time of each of ``count`` sessions, in seconds; the first at 0.

    Gaps follow a Gamma distribution with shape ``burstiness`` and mean ``1 / rate_per_s``: 1 is
    a Poisson process, less comes in bursts (the variance of a gap over its squared mean is
    ``1 / burstiness``), more is steadier.

    Source: vLLM's ``bench serve`` (the parameter); BurstGPT, section 4 (Gamma arrivals)
    """
    rng, now = random.Random(seed), 0.0
    times = list[float]()
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))
    return times
