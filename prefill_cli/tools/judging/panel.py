"""Who counts, in which segment, and the metrics of a list beside what its user took."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefill_cli.tools.judging.bootstrap import Tally
from prefill_cli.tools.judging.held_out import Users
from prefill_cli.tools.judging.ids import Ints
from prefill_cli.tools.judging.ranking_metrics import Floats, find_hits, user_values
from prefill_cli.tools.judging.result_lists import Lists


@dataclass
class Panel:
    """Users, and which of them count: those with held-out items whom the run was given.

    Rows are numbers of users; -1 stands for a list or an input row that is no user's.
    """

    users: Users | None
    ks: Sequence[int]
    counted: npt.NDArray[np.bool_] = field(init=False)  # [users]
    strangers: int = field(init=False)  # users with held-out items whom the run was not given
    _number: Ints = field(init=False)  # [users] among those who count

    def __post_init__(self) -> None:
        users, truths = self.users, self.users.truths if self.users else None
        if users is None or truths is None:
            self.counted, self.strangers = np.zeros(users.rows if users else 0, bool), 0
        else:
            known = np.diff(truths.offsets) > 0
            self.counted, self.strangers = known & users.in_run, int(np.count_nonzero(known & ~users.in_run))
        self._number = np.cumsum(self.counted) - 1

    @property
    def segments(self) -> int:
        return len(self.users.values) if self.users else 1

    def new_tally(self) -> Tally:
        return Tally(tuple(self.ks), int(np.count_nonzero(self.counted)), self.segments)

    def add(self, tally: Tally, rows: Ints, values: Floats | None = None) -> None:
        """Count users who count, with [metrics * ks, n] values; None: all are 0."""
        assert self.users
        tally.add(self._number[rows], self.users.segments[rows], values)

    def who_counts(self, rows: Ints) -> Ints:
        """The places of rows of users who count."""
        there = np.flatnonzero(rows >= 0)
        return there[self.counted[rows[there]]]

    def segments_of(self, rows: Ints) -> Ints:
        """[rows] the segment of each; one more than there are for -1."""
        if self.users is None or self.segments == 1:
            return np.zeros(len(rows), np.int64)
        found = np.full(len(rows), self.segments)
        found[rows >= 0] = self.users.segments[rows[rows >= 0]]
        return found

    def rows_of(self, numbers: Ints) -> Ints:
        """The users of some of the result's lists."""
        return self.users.of_list[numbers] if self.users else np.full(len(numbers), -1)

    def values(self, lists: Lists, rows: Ints) -> Floats:
        """[metrics * ks, n] of n lists, each beside a user who counts."""
        assert self.users and self.users.truths
        offsets, items = self.users.truths.take(rows)
        return user_values(*find_hits(lists, offsets, items), np.diff(offsets), self.ks)
