"""How the lists of two runs differ: the same users' lists side by side, in bounded memory.

Of a user with a list in both (an empty list is none), A and B, over their first k, with X(d) the number of items that are
in both A's and B's first d:

overlap@k   X(k) / k
jaccard@k   X(k) / |A's first k, or B's|
rbo         rank-biased overlap over the whole lists, extrapolated for what lies behind their ends: RBO_ext, equation 32
            of Webber, Moffat, Zobel, A similarity measure for indefinite rankings, ACM TOIS 28(4), 2010, which is

              (1 - p) / p * ( sum over d = 1 ... l of X(d) / d * p^d
                              + sum over d = s + 1 ... l of X(s) * (d - s) / (s * d) * p^d )
              + ( (X(l) - X(s)) / l + X(s) / s ) * p^l

            for a shorter list of s items and a longer one of l. 1: the same list; 0: no item in common. With p = 0.9 the
            first ten places have 86 % of the weight.
unchanged   the share of users whose two lists hold the same items in the same order
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.errors import InputError
from prefill_cli.tools.judging.ids import Ints, encode, find_ids, kind_of_ids, offsets_of, repeated
from prefill_cli.tools.judging.ranking_metrics import Floats
from prefill_cli.tools.judging.result_lists import Lists, Result, ids_of, in_turn, open_result, read_lists

BLOCK_ELEMENTS = 64_000_000  # list elements of OTHER that are held where its users come in another order: 256 MB
STEP_ELEMENTS = 1 << 19  # sorted at a time

Visit = Callable[[Lists, Ints, Lists], None]


def compare_runs(output: Path, other: Path, ks: Sequence[int], *, rbo_p: float = 0.9) -> dict[str, Any]:
    """How the lists in `output` differ from those in `other`.

    Returns `users` (with a list in both), `only_in_output`, `only_in_other`, `unchanged`, `overlap` and `jaccard` (k → mean
    over users), `rbo` and `rbo_p`; means are None where no user is in both.

    Raises:
        OutputError: one of them is not a finished result. InputError: users cannot be told apart, or ids are of two kinds.
    """
    return compare_results(open_result(output), open_result(other), ks, rbo_p)


def compare_results(
    output: Result, other: Result, ks: Sequence[int], rbo_p: float, visit: Visit | None = None
) -> dict[str, Any]:
    """The same. visit(A, numbers of the lists in `output`, B) sees the pairs, list beside list."""
    sums, seen = _Sums(tuple(ks), rbo_p), _Seen()
    for values in in_turn(lambda pair: (pair, sums.of_pair(pair[0], pair[2])), paired_lists(output, other, seen)):
        pair, found = values
        sums.add(found)
        if visit is not None:
            visit(*pair)
    return {
        "output": str(output.folder),
        "other": str(other.folder),
        "users": sums.users,
        "only_in_output": seen.output - sums.users,
        "only_in_other": seen.other - sums.users,
        **sums.summary(),
    }


@dataclass
class _Seen:
    """Lists that are not empty, counted as they are read."""

    output: int = 0
    other: int = 0


def paired_lists(output: Result, other: Result, seen: _Seen) -> Iterator[tuple[Lists, Ints, Lists]]:
    """(A, numbers of the lists in `output`, B): the same users' lists that are not empty, a chunk of `output` at a time.

    Where users come in the same order in both, each is read once. Otherwise as much of `other` as BLOCK_ELEMENTS is held,
    and `output` is read once for each such block.
    """
    partner = _partners(output, other)
    matched = partner[partner >= 0]
    if (np.diff(matched) > 0).all():
        yield from _in_step(output, other, partner, seen)
    else:
        yield from _in_blocks(output, other, partner, seen)


def _partners(output: Result, other: Result) -> Ints:
    """[lists of output] the number of the same user's list in `other`; -1 where there is none."""
    kinds = [kind_of_ids(result.schema.field(result.id_column).type) for result in (output, other)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{other.folder}: its user ids are {kinds[1]}, those of {output.folder} are {kinds[0]}")
    items = [kind_of_ids(result.item_type) for result in (output, other)]
    if items[0] != items[1]:
        raise InputError(f"{other.folder}: its item ids are {items[1]}, those of {output.folder} are {items[0]}")
    ids, others = ids_of(output), ids_of(other)
    if ids.equals(others):  # the same rows, whether or not their ids are distinct
        return np.arange(len(ids))
    for result, known in ((output, ids), (other, others)):
        if twice := repeated(known):
            raise InputError(
                f"{result.folder}: user ids that occur more than once ({', '.join(map(str, twice))}) cannot be matched with "
                "another run's; compare runs over the same rows, or over rows with distinct ids"
            )
    return find_ids(ids, others)


def _in_step(output: Result, other: Result, partner: Ints, seen: _Seen) -> Iterator[tuple[Lists, Ints, Lists]]:
    stream = _counted(read_lists(other), seen, "other")
    window: list[Lists] = []
    for lists in _counted(read_lists(output), seen, "output"):
        rows = np.flatnonzero(partner[lists.start : lists.start + len(lists)] >= 0)
        if not len(rows):
            continue
        partners = partner[lists.start + rows]
        window = [chunk for chunk in window if chunk.start + len(chunk) > partners[0]]
        while not window or window[-1].start + len(window[-1]) <= partners[-1]:
            window.append(next(stream))
        yield from _pairs(lists, rows, partners, joined([c for c in window if c.start + len(c) > partners[0]]))
    for _ in stream:  # to count the rest
        pass


def _in_blocks(output: Result, other: Result, partner: Ints, seen: _Seen) -> Iterator[tuple[Lists, Ints, Lists]]:
    first = True
    for block in _blocks(_counted(read_lists(other), seen, "other")):
        for lists in _counted(read_lists(output), seen if first else _Seen(), "output"):
            partners = partner[lists.start : lists.start + len(lists)]
            rows = np.flatnonzero((partners >= block.start) & (partners < block.start + len(block)))
            yield from _pairs(lists, rows, partners[rows], block)
        first = False
    if first:  # nothing to compare with; still the lists are counted
        for _ in _counted(read_lists(output), seen, "output"):
            pass


def _blocks(chunks: Iterator[Lists]) -> Iterator[Lists]:
    held: list[Lists] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(len(c.codes) for c in held) >= BLOCK_ELEMENTS:
            yield joined(held)
            held = []
    if held:
        yield joined(held)


def _counted(chunks: Iterator[Lists], seen: _Seen, name: str) -> Iterator[Lists]:
    for lists in chunks:
        setattr(seen, name, getattr(seen, name) + int(np.count_nonzero(lists.lengths)))
        yield lists


def _pairs(lists: Lists, rows: Ints, partners: Ints, others: Lists) -> Iterator[tuple[Lists, Ints, Lists]]:
    theirs = partners - others.start
    both = (lists.lengths[rows] > 0) & (others.lengths[theirs] > 0)
    if both.any():
        yield lists.take(rows[both]), lists.start + rows[both], others.take(theirs[both])


def joined(chunks: Sequence[Lists]) -> Lists:
    """Consecutive chunks as one, with codes in common."""
    if len(chunks) == 1:
        return chunks[0]
    codes, item_ids = encode(pa.concat_arrays([pa.DictionaryArray.from_arrays(c.codes, c.item_ids) for c in chunks]))
    return Lists(chunks[0].start, offsets_of(np.concatenate([c.lengths for c in chunks])), codes, item_ids)


@dataclass
class _Sums:
    """Sums over users of what is told of a pair."""

    ks: tuple[int, ...]
    p: float
    users: int = 0
    totals: Floats = field(init=False)  # [2 * ks + 2]: overlap, jaccard, rbo, unchanged

    def __post_init__(self) -> None:
        self.totals = np.zeros(2 * len(self.ks) + 2)

    def of_pair(self, a: Lists, b: Lists) -> Floats:
        """[2 * ks + 2, n] of n users."""
        steps, found = max(1, STEP_ELEMENTS // int(a.lengths.max() + b.lengths.max())), []
        there = pc.fill_null(pc.index_in(a.item_ids, value_set=b.item_ids), -1).to_numpy().astype(np.int64)
        only = there < 0
        there[only] = len(b.item_ids) + np.arange(np.count_nonzero(only))
        for start in range(0, len(a), steps):
            rows = np.arange(start, min(start + steps, len(a)))
            x, y = a.take(rows), b.take(rows)
            left, right = _matrix(x.offsets, there[x.codes]), _matrix(y.offsets, y.codes.astype(np.int64))
            found.append(self._values(left, x.lengths, right, y.lengths))
        return np.concatenate(found, axis=1)

    def _values(self, left: Ints, s: Ints, right: Ints, t: Ints) -> Floats:
        common = overlaps(left, right)
        out = []
        for k in self.ks:
            both = common[:, min(k, common.shape[1]) - 1]
            out.append(both / k)
        for k in self.ks:
            both = common[:, min(k, common.shape[1]) - 1]
            out.append(both / (np.minimum(s, k) + np.minimum(t, k) - both))
        width = min(left.shape[1], right.shape[1])
        same = (s == t) & (left[:, :width] == right[:, :width]).all(axis=1)
        return np.stack([*out, rbo_ext(common, s, t, self.p), same])

    def add(self, values: Floats) -> None:
        self.users += values.shape[1]
        self.totals += values.sum(axis=1)

    def summary(self) -> dict[str, Any]:
        n = len(self.ks)
        means = [float(total) / self.users if self.users else None for total in self.totals]
        at_k = [{str(k): mean for k, mean in zip(self.ks, some, strict=True)} for some in (means[:n], means[n : 2 * n])]
        return {"unchanged": means[-1], "overlap": at_k[0], "jaccard": at_k[1], "rbo": means[-2], "rbo_p": self.p}


def _matrix(offsets: Ints, codes: Ints) -> Ints:
    """[n, longest] the lists as rows; -1 behind the end of the shorter ones."""
    lengths = np.diff(offsets)
    inside = np.arange(lengths.max(initial=1)) < lengths[:, None]
    rows = np.full(inside.shape, -1, np.int64)
    rows[inside] = codes
    return rows


def overlaps(left: Ints, right: Ints) -> Ints:
    """[n, depth] X(d), for d = 1 ... the longer width, of lists as rows of codes, distinct in a row; -1: no item."""
    n, wide, depth = len(left), left.shape[1] + right.shape[1], max(left.shape[1], right.shape[1])
    bits = wide.bit_length()
    keys = np.concatenate([left, right], axis=1) << bits | np.arange(wide)
    keys.sort(axis=1)  # an item of both lists now stands beside itself, the left one's first
    item, place = keys >> bits, keys & ((1 << bits) - 1)
    row, at = np.divmod(np.flatnonzero((item[:, 1:] == item[:, :-1]) & (item[:, 1:] >= 0)), wide - 1)
    deeper = np.maximum(place[row, at], place[row, at + 1] - left.shape[1])
    counts: npt.NDArray[np.int64] = np.bincount(row * depth + deeper, minlength=n * depth)
    return counts.reshape(n, depth).cumsum(axis=1)


def rbo_ext(common: Ints, s: Ints, t: Ints, p: float) -> Floats:
    """[n] RBO_ext from [n, depth] X(d) and the lengths of the two lists, at least 1 each."""
    rows, d = np.arange(len(common)), np.arange(1, common.shape[1] + 1)
    short, long = np.minimum(s, t), np.maximum(s, t)
    weight = p**d
    agreed = np.cumsum(common / d * weight, axis=1)[rows, long - 1]
    behind = np.cumsum(weight)[long - 1] - np.cumsum(weight)[short - 1]
    behind -= short * (np.cumsum(weight / d)[long - 1] - np.cumsum(weight / d)[short - 1])
    x_s, x_l = common[rows, short - 1], common[rows, long - 1]
    value: Floats = (1 - p) / p * (agreed + x_s / short * behind) + ((x_l - x_s) / long + x_s / short) * weight[long - 1]
    return value
