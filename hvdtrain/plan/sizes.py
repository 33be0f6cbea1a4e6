"""A profile from sizes alone, for a model that is not here: `hvdtrain plan --parameters 124M --step-seconds 0.8`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hvdtrain.plan import coding, profile
from hvdtrain.plan.prediction import EXACT_REDUCER
from hvdtrain.plan.profile import MOST_PARAMETERS, Point, Profile
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
ARRAYS = 64
RANK = 8
ASSUMED = {
    True: f"taken to be {ARRAYS} square matrices; powersgd depends on their shapes",
    False: f"taken to be LoRA's, {ARRAYS} matrices of rank {RANK}; powersgd depends on their shapes",
}
"""What is assumed of the trained parameters, by whether they are all"""


def count(option: str, text: str) -> int:
    """Parse a number such as 124M. Raises Failure (2)."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMB]?)", text.upper())
    number = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not ARRAYS <= number <= MOST_PARAMETERS:
        raise Failure(f"{option} {text}: not a number of parameters; hint: 500K, 124M or 7B", exits.USAGE)
    return number


def profiled(
    parameters: str, trainable: str | None, step_s: float, names: Sequence[str], ranks: int, size: int | None
) -> tuple[Profile, list[str]]:
    """Return a profile, and its assumptions. Raises Failure (2).

    `names`: reducers, whose coding takes the processor time that was recorded for others. `ranks`: of a host, which has
    a core for each and one for coding. `size`: samples of a step on one host; None: a sample is what a rank computes.
    """
    total, trained = count("--parameters", parameters), count("--trainable", trainable or parameters)
    if trained > total:
        raise Failure(f"--trainable {trainable}: more than --parameters {parameters}; hint: swap them", exits.USAGE)
    if not 1e-4 <= step_s <= 1e6:
        raise Failure(
            f"--step-seconds {step_s:g}: not a time; hint: the seconds of a step on one host, such as 0.8", exits.USAGE
        )
    columns = round(math.sqrt(trained / ARRAYS)) if trained == total else RANK
    shapes = [[math.ceil(trained / ARRAYS / columns), columns]] * ARRAYS
    coding_s = coding.recorded(names, shapes)
    own_s = max(step_s / 2, step_s - (ranks - 1) * coding_s[EXACT_REDUCER])  # the host's own sums are in its step
    made = Profile(
        machine={"processor": None, "cores": ranks + 1.0},
        workload="sizes",
        model=f"{trained / 1e6:.3g} M trained parameters of {total / 1e6:.3g} M",
        setup={},
        shapes=shapes,
        epoch_samples=None,
        threads=1,
        points=[Point(batch=max(1, (size or 1) // ranks), backward_s=own_s, update_s=0.0, variation=0.0, steps=1)],
        coding_s=coding_s,
        drop_in=True,
    )
    sample = profile.ASSUMED_FIXED if size else "a sample is what one rank computes in a step"
    return made, [f"the trained parameters are {ASSUMED[trained == total]}", sample]
