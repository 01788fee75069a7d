"""Shards on N workers, simulated: when the last is committed, and what the workers' hours went into.

The driver hands out shards in order, each to the worker that asks first. A worker starts, reads its first shard, and then
encodes one after another while the next is read and the one before is searched and written (engines/local.py), so it asks
for a shard when the one before goes into the model. The driver commits what is finished, one shard after another.

A worker dies after an exponential time. Its shard is lost, a replacement starts and does it again; a shard that `ATTEMPTS`
workers died of is given up.

While shards are left no worker waits for another. So with times that do not depend on the shard's number every worker's
row of askings can be drawn alone, and the S earliest askings of all are the S shards: the events of the heap, found by
sorting. A replicate costs O(S log S), without a loop over events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ATTEMPTS = 3  # deaths after which a shard is given up
FEW_SHARDS = 8  # measured: fewer say too little of how they spread
MOST_SHARDS = 2_000_000
REPLICATES, FEWEST_REPLICATES = 200, 5
CELLS = 1_200_000  # shards simulated for one forecast, in all its replicates
INTERVAL = (0.025, 0.5, 0.975)
MEDIAN_ERROR = 1.96 * 1.2533  # half a 95 % interval of a sample's median, in standard errors of its mean (normal)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """How times of shards differ: factors of mean 1. shares: those of measured shards, drawn again; none: log-normal."""

    shares: tuple[float, ...]
    sigma: float  # of the logarithm, where there are no shares

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        if self.shares:
            return np.array(self.shares)[rng.integers(0, len(self.shares), shape)]
        return np.exp(rng.normal(-0.5 * self.sigma**2, self.sigma, shape)) if self.sigma else np.ones(shape)


@dataclass(frozen=True)
class Pace:
    """Seconds of a worker like the measured one. read, encode, finish: of a row, where the three steps overlap."""

    read_sec: float
    encode_sec: float
    finish_sec: float  # search and writing
    start_sec: float  # of a worker: items and model, until it can encode
    launch_sec: float  # until a worker is there that can start
    commit_sec: float  # of a shard, by the driver
    once_sec: float  # of a run, beside all that: planning, checking, publishing
    spread: Spread
    overlap: bool = True

    @property
    def step_sec(self) -> float:
        """Of a row, as long as one shard follows another."""
        steps = (self.read_sec, self.encode_sec, self.finish_sec)
        return max(steps) if self.overlap else sum(steps)


@dataclass(frozen=True)
class Work:
    """rows: of the input. mtbf_sec: mean time between the deaths of a worker, infinite for none."""

    workers: int
    rows: int
    shard_rows: int
    mtbf_sec: float = math.inf
    attempts: int = ATTEMPTS

    @property
    def shards(self) -> int:
        return max(1, -(-self.rows // self.shard_rows))


class Fate(NamedTuple):
    """A replicate: seconds until all is committed, and what the workers did meanwhile, as shares of all their time."""

    sec: float
    busy: float  # shards that came to an end
    lost: float  # shards that a death cut short, and starting again
    idle: float  # after a worker's last shard
    given_up: int


@dataclass(frozen=True)
class Forecast:
    """Of some replicates. low, high: the middle 95 % of them. error: half a 95 % interval of the median, as its share."""

    sec: float  # the median
    low: float
    high: float
    error: float
    replicates: int
    busy: float
    lost: float
    idle: float
    given_up: float


def forecast(pace: Pace, work: Work, seed: int = 0, replicates: int | None = None) -> Forecast:
    """Simulate; a pair of `work` and `seed` gives the same result whatever else is simulated.

    replicates: None for REPLICATES, fewer where there are many shards, whose sum varies little.
    """
    number = replicates or max(FEWEST_REPLICATES, min(REPLICATES, CELLS // work.shards))
    rng = np.random.default_rng((seed, work.workers, work.rows, work.shard_rows))
    fates = [simulate(pace, work, rng) for _ in range(number)]
    sec, busy, lost, idle, given_up = np.array(fates).T
    low, median, high = np.quantile(sec, INTERVAL)
    error = MEDIAN_ERROR * float(sec.std(ddof=1)) / math.sqrt(number) / float(median) if number > 1 else math.nan
    means = (float(share.mean()) for share in (busy, lost, idle, given_up))
    return Forecast(float(median), float(low), float(high), error, number, *means)


def simulate(pace: Pace, work: Work, rng: np.random.Generator) -> Fate:
    """One replicate."""
    n, shards = work.workers, work.shards
    full = min(work.shard_rows, work.rows)
    begin = pace.launch_sec + pace.start_sec
    read, finish = (pace.read_sec * full, pace.finish_sec * full) if pace.overlap else (0.0, 0.0)
    columns, each = 0, shards / n
    steps = lost = np.empty((n, 0))
    given_up = np.empty((n, 0), bool)
    while True:
        more = min(shards, columns + math.ceil(each + 4 * math.sqrt(each)) + 2) - columns
        drawn = full * pace.step_sec * pace.spread.draw(rng, (n, more))
        found = _deaths(drawn, work, begin, rng)
        steps, lost, given_up = (
            np.concatenate(pair, axis=1) for pair in ((steps, drawn), (lost, found[0]), (given_up, found[1]))
        )
        columns += more
        ends = begin + read + np.cumsum(np.where(given_up, 0.0, steps) + lost, axis=1)  # [n, columns] of encoding
        asked = np.concatenate([np.full((n, 1), begin), ends[:, :-1]], axis=1)
        if pace.overlap and columns > 1:  # the next is asked for when this one goes into the model
            asked = np.concatenate([asked[:, :1], np.full((n, 1), begin + read), ends[:, :-2]], axis=1)
        # Column by column, so that of askings at one time those of idle workers come first.
        order = np.argsort(asked.T, axis=None, kind="stable")[:shards]
        taken = np.bincount(order % n, minlength=n)
        if columns == shards or taken.max() < columns:
            break
    k, w = np.divmod(order, n)
    steps, lost, ends = (np.where(given_up, 0.0, steps)[w, k], lost[w, k], ends[w, k])
    short = full - (work.rows - (shards - 1) * work.shard_rows)  # rows that the last shard, the last taken, has too few
    missing = steps[-1] * short / full if full else 0.0
    steps[-1] -= missing
    ends[-1] -= missing
    return _fate(pace, work, (steps, lost, ends + finish, w), int(given_up[w, k].sum()), begin)


def _fate(
    pace: Pace, work: Work, shards: tuple[Floats, Floats, Floats, npt.NDArray[np.intp]], given_up: int, begin: float
) -> Fate:
    """From shards' steps, losses, ends and workers, in the order taken. begin: when workers have started."""
    steps, lost, finished, w = shards
    # A queue of one: the last of n is committed when each has waited for those before (Lindley's recursion, unrolled).
    behind = np.arange(len(finished), 0, -1)
    sec = float((np.sort(finished) + behind * pace.commit_sec).max())
    last = np.full(work.workers, begin)
    np.maximum.at(last, w, finished)
    whole = work.workers * sec or 1.0
    idle = float(np.maximum(sec - last, 0.0).sum())
    return Fate(pace.once_sec + sec, float(steps.sum()) / whole, float(lost.sum()) / whole, idle / whole, given_up)


def _deaths(steps: Floats, work: Work, again_sec: float, rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[n, k] seconds that each shard costs beside the attempt that succeeds, and whether none did.

    Without giving up, a shard of t seconds takes (exp(t / m) - 1) (m + again) on average with a mean m between deaths:
    exp(t / m) - 1 deaths, each of which costs a time that is exponential below t, and starting again. (Asmussen, Fiorini,
    Lipsky, Rolski and Sheahan, Mathematics of Operations Research 33(4), 2008, call it RESTART.)
    """
    lost, alive = np.zeros(steps.shape), np.ones(steps.shape, bool)
    if math.isinf(work.mtbf_sec):
        return lost, ~alive
    at = np.arange(steps.size)
    for _ in range(work.attempts):
        died = rng.exponential(work.mtbf_sec, len(at))
        dead = died < steps.flat[at]
        at = at[dead]
        if not len(at):
            break
        lost.flat[at] += died[dead] + again_sec
    alive.flat[at] = False
    return lost, ~alive


def spread_of(seconds: Sequence[float], rows: Sequence[int], assumed: float) -> Spread:
    """How measured shards of about one size differ in seconds a row; of FEW_SHARDS and fewer the assumed spread."""
    most = max(rows, default=0)
    of_row = np.array([sec / n for sec, n in zip(seconds, rows, strict=True) if n > most / 2 and sec > 0])
    if len(of_row) < FEW_SHARDS:
        return Spread((), assumed)
    return Spread(tuple(float(share) for share in of_row / of_row.mean()), 0.0)
