"""95 % intervals of means over users, by the Poisson bootstrap over groups of users, in memory that does not grow.

A replicate of the bootstrap weighs each user with the number of times that it is drawn: Poisson(1), independent of the
others (Hanley, MacGibbon, Creating non-parametric bootstrap samples using Poisson frequencies, Computer Methods and
Programs in Biomedicine 83 (2006); Chamandy, Muralidharan, Najmi, Naidu, Estimating uncertainty for massive data streams,
Google (2012)). Its mean is the weighted sum over the sum of weights, and the interval lies between the 2.5 and 97.5 %
quantiles of all replicates' means.

Up to GROUPS users each has a weight of its own. More are put into GROUPS groups by a hash of their number, and a group has
one weight: since users are independent and groups do not depend on their values, every cumulant of the sum of group sums
is in expectation that of the sum of users (cumulants of independent summands add), so the replicates have the same spread
and skewness. What is lost is precision of the spread, about 1 / sqrt(2 * GROUPS) = 0.8 % of it, while 1 000 replicates
leave an end of the interval uncertain by 4 % of the half width. Weights depend on the seed, the group and the replicate
alone; sums are taken in the order of users. So neither depends on how the users were batched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.tools.judging.ids import Ints
from prefill_cli.tools.judging.ranking_metrics import METRICS, Floats

GROUPS = 8_192
BLOCK = 128  # replicates whose weights are held as float64 at a time
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Bootstrap:
    """How many replicates (0: no intervals), from which seed."""

    replicates: int = 1_000
    seed: int = 0

    def intervals(self, sums: Floats, users: Floats) -> Floats | None:
        """[2, m] low and high of sums.sum(1) / users.sum(), from [m, groups] sums over users and [groups] their numbers.

        A replicate that draws nobody, which happens among a handful of users, is left out; None where all do, or none is
        asked for.
        """
        weights, means = _weights(self.seed, self.replicates, len(users)), []
        for start in range(0, self.replicates, BLOCK):
            block = weights[start : start + BLOCK].astype(np.float64)
            drawn = block @ users
            means.append((block @ sums.T)[drawn > 0] / drawn[drawn > 0, None])
        every = np.concatenate(means or [np.empty((0, len(sums)))])
        return np.quantile(every, INTERVAL, axis=0) if len(every) else None


@lru_cache(maxsize=1)
def _weights(seed: int, replicates: int, groups: int) -> npt.NDArray[np.uint8]:
    """[replicates, groups] the same for every segment, list and run, so that differences are paired. No draw reaches 256."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((replicates, groups), np.uint8)
    for one in drawn:
        one[:] = rng.poisson(1.0, groups)
    return drawn


def group_of(numbers: Ints, users: int) -> npt.NDArray[np.int64]:
    """The group of each user, known by its number among `users`: itself, or a hash (splitmix64) of it."""
    if users <= GROUPS:
        return numbers
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(GROUPS)).astype(np.int64)


@dataclass
class Tally:
    """Sums of users' values by segment and group; what means and intervals are made of.

    users: how many there will be at most. segments: how many there are.
    """

    ks: tuple[int, ...]
    users: int
    segments: int = 1
    sums: Floats = field(init=False)  # [metrics * ks, segments, groups]
    counts: Floats = field(init=False)  # [segments, groups]

    def __post_init__(self) -> None:
        groups = max(1, min(self.users, GROUPS))
        self.sums = np.zeros((len(METRICS) * len(self.ks), self.segments, groups))
        self.counts = np.zeros((self.segments, groups))

    def add(self, numbers: Ints, segments: Ints, values: Floats | None = None) -> None:
        """Users by number, each one's segment, and [metrics * ks, n] their values; None: all are 0."""
        at = segments * self.counts.shape[1] + group_of(numbers, self.users)
        np.add.at(self.counts.reshape(-1), at, 1.0)  # one after another: no sum depends on how users are batched
        for row, sums in zip(() if values is None else values, self.sums, strict=False):
            np.add.at(sums.reshape(-1), at, row)

    def summary(self, bootstrap: Bootstrap, segment: int | None = None) -> dict[str, Any]:
        """Metric → k → mean, low and high; of one segment or of all. Empty without users."""
        sums = self.sums.sum(1) if segment is None else self.sums[:, segment]
        counts = self.counts.sum(0) if segment is None else self.counts[segment]
        users = counts.sum()
        if not users:
            return {}
        means = sums.sum(1) / users
        ends = bootstrap.intervals(sums, counts)
        return by_name(self.ks, [_told(mean, None if ends is None else ends[:, m]) for m, mean in enumerate(means)])


def by_name(ks: Sequence[int], values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """[metrics * ks] as metric → k → value. Keys are text, as in JSON."""
    given = iter(values)
    return {name: {str(k): next(given) for k in ks} for name in METRICS}


def _told(mean: float, ends: Floats | None) -> dict[str, float]:
    told = {"mean": float(mean)}
    return told if ends is None else told | {"low": float(ends[0]), "high": float(ends[1])}
