"""90 % intervals of predicted step times: the recorded error of the model, and how well the profile knows its means."""

from __future__ import annotations

import math
from statistics import NormalDist

from hvdtrain.plan.profile import Profile

SEVERAL_HOSTS = (0.86, 1.16)
"""Recorded / predicted, 5 % and 95 %: 32 cells of docs/benchmarks/predictions.md, on the TCP backend"""
ONE_HOST = (0.95, 1.05)
"""For one host: 0.96 to 1.01 in six runs there (PyTorch, steps of 16 ms and more), rounded up"""
FROM_RUN = (0.82, 1.2)
"""For predictions from another run: 1,470 pairs of runs there"""
COMPARED = {"framework": "torch", "device": "cpu"}
"""What the setups of all these runs have in common. A profile from a run does not name the framework"""
UNKNOWN_VARIATION = 0.1
"""Assumed if it was not measured: at most that much was measured in 27 of 29 profiles"""
WIDTH = NormalDist().inv_cdf(0.95)


def of(step_s: float, hosts: int, computing: float, profile: Profile, backend: str) -> tuple[float, float] | None:
    """Return the 90 % interval of the mean step time of a run; None if no run of this kind was compared.

    `computing`: share of computation in a step.
    """
    compared = all(profile.setup.get(name, value) == value for name, value in COMPARED.items())
    if not compared or profile.drop_in or (hosts > 1 and backend != "tcp"):
        return None
    least, most = FROM_RUN if profile.from_run else SEVERAL_HOSTS if hosts > 1 else ONE_HOST
    known = [each.variation for each in profile.points if each.variation]
    error = max(known, default=UNKNOWN_VARIATION) / math.sqrt(min(each.steps for each in profile.points))
    noise = math.exp(WIDTH * error * computing)
    return step_s / combined(1 / least, noise), step_s * combined(most, noise)


def combined(*factors: float) -> float:
    """Return the factor, at least 1, by which independent errors of these factors change a number."""
    return math.exp(math.hypot(*map(math.log, factors)))
