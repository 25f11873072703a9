"""The paired difference of two ways to train: from the same seeds, weights and batches.

For each seed the difference of the two losses is taken. Those differences are one sample of a normal
distribution with unknown mean and variance. The confidence interval of its mean is

    d +- t(0.975, n - 1) * s / sqrt(n)        d, s: mean and standard deviation (n - 1) of the n differences

("Student", The probable error of a mean, Biometrika 6, 1908). Two ways count as equal only if the whole
interval lies within a margin that was chosen before. It is not enough that no difference was found
(Schuirmann, A comparison of the two one-sided tests procedure, J. Pharmacokinet. Biopharm. 15, 1987). The
level of 5 % there asks for the 90 % interval, which is narrower. Too few seeds or too much noise therefore
make the test fail.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The difference of `num_seeds` pairs, as a share of the reference's mean loss: 0.003 is 0.3 % worse.

    mean, half_width  the interval with the confidence asked for is mean +- half_width
    """

    num_seeds: int
    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def verdict(self, margin: float) -> str:
        """equal: the interval lies within +-margin; different: wholly outside; undecided: neither."""
        if -margin <= self.low and self.high <= margin:
            return "equal"
        return "different" if self.low > margin or self.high < -margin else "undecided"

    def __str__(self) -> str:
        return f"{self.mean:+.3%} ± {self.half_width:.3%}"


def difference(
    losses: Sequence[float], reference: Sequence[float], confidence: float = CONFIDENCE
) -> Difference:
    """Pairs losses by place: the same seed in both. Raises ValueError for fewer than two pairs."""
    pairs = list(zip(losses, reference, strict=True))
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pair(s): a standard deviation needs at least two")
    differences = [loss - other for loss, other in pairs]
    scale = statistics.mean(reference)
    error = statistics.stdev(differences) / math.sqrt(len(pairs))
    quantile = t_quantile((1 + confidence) / 2, len(pairs) - 1)
    return Difference(len(pairs), statistics.mean(differences) / scale, quantile * error / scale)


def t_quantile(probability: float, degrees: int) -> float:
    """The t below which a Student distribution has `probability` (> 1/2); `degrees` of freedom."""
    if not 0.5 < probability < 1 or degrees < 1:
        raise ValueError(f"probability {probability} is not in (0.5, 1), or degrees {degrees} below 1")
    low, high = 0.0, 1.0
    while t_within(high, degrees) < 2 * probability - 1:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):  # until they are neighbouring floats
        if t_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return middle


def t_within(t: float, degrees: int) -> float:
    """Probability that |T| <= t: the finite sums for whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd) and 26.7.4 (even), with
    tan(angle) = t / sqrt(degrees).
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    # cos + 2/3 cos^3 + 2*4/(3*5) cos^5 + ...   or   1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
