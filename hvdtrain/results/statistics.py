"""Mean, median, range and 95 % interval of repeated measurements, and of ratios of two means.

The interval of a mean is Student's: mean +- t(0.975; n - 1) s / sqrt(n), where s is the sample's standard deviation. It
assumes independent and roughly normal runs, and needs at least two. Ratios use Welch's standard error and degrees
of freedom (Welch, 1947), so the two sides may differ in spread and in number. Their interval is computed on the
difference of logarithms (delta method).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Statistics of n values. `low` and `high` bound the 95 % interval of the mean; None for n < 2."""

    mean: float
    median: float
    min: float
    max: float
    low: float | None
    high: float | None
    n: int
    sd: float | None
    """Standard deviation of the sample; None for n < 2"""

    @property
    def span(self) -> tuple[float, float] | None:
        """The spread to print: the 95 % interval. For n = 2 it is both values, because their interval is 12.7 times as
        wide as their distance. None for n < 2."""
        if self.low is None or self.high is None:
            return None
        return (self.min, self.max) if self.n == 2 else (self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate from two means and its 95 % interval, which is None if a side has less than two values."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def span(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __truediv__(self, divisor: float) -> Interval:
        low, high = (None if bound is None else bound / divisor for bound in (self.low, self.high))
        return Interval(self.mean / divisor, low, high)


def summary(values: Iterable[float | None]) -> Statistic | None:
    """The statistics of the values that are neither None nor NaN; None if there is no such value."""
    known = sorted(float(value) for value in values if value is not None and not math.isnan(value))
    n = len(known)
    if not n:
        return None
    mean = known[0] if known[0] == known[-1] else math.fsum(known) / n  # rounding would give equal values a spread
    median = (known[(n - 1) // 2] + known[n // 2]) / 2
    if n < 2:
        return Statistic(mean, median, known[0], known[-1], None, None, n, None)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (n - 1))
    half = t_quantile(n - 1) * sd / math.sqrt(n)
    return Statistic(mean, median, known[0], known[-1], mean - half, mean + half, n, sd)


def ratio(above: Statistic | None, below: Statistic | None) -> Interval | None:
    """above.mean / below.mean; None if a side is missing or not positive."""
    return _on_logarithms(above, below, lambda a, b: a / b)


def product(a: Statistic | None, b: Statistic | None) -> Interval | None:
    """a.mean x b.mean of independent measurements, with the interval of a ratio."""
    return _on_logarithms(a, b, lambda a, b: a * b)


def _on_logarithms(
    a: Statistic | None, b: Statistic | None, combined: Callable[[float, float], float]
) -> Interval | None:
    if a is None or b is None or a.mean <= 0 or b.mean <= 0:
        return None
    mean = combined(a.mean, b.mean)
    if a.sd is None or b.sd is None:
        return Interval(mean)
    half = _half_width([(a.sd / a.mean) ** 2 / a.n, (b.sd / b.mean) ** 2 / b.n], [a.n, b.n])
    return Interval(mean, mean * math.exp(-half), mean * math.exp(half))


@functools.lru_cache(maxsize=4096)
def t_quantile(freedom: float) -> float:
    """t such that a Student variable with `freedom` > 0 degrees lies within +-t with probability LEVEL."""
    from scipy.special import stdtrit  # slow to load, and a list of runs does not need it

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _half_width(variances: list[float], counts: list[int]) -> float:
    """Half of the 95 % interval of the sum of two estimates with these variances (Satterthwaite's degrees of
    freedom)."""
    total = math.fsum(variances)
    if not total:
        return 0.0
    parts = ((part / total) ** 2 / (n - 1) for part, n in zip(variances, counts, strict=True))
    return t_quantile(1 / math.fsum(parts)) * math.sqrt(total)
