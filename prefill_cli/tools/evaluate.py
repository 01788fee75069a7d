"""`prefill-score evaluate`: how good a result's lists are, beside those of the most popular items and of another run.

A pass over the lists, a row group at a time; what is held are the held-out items (four bytes each, and some a user), sums
by segment and group of users (bootstrap.py), and counts by item. With a baseline two passes over the input's histories, with
another run one more over the lists.

Who counts, for the metrics of held-out items: users whose held-out items are known and who were given to the run. Those
without a list (an empty one, a rejected row, a row left out by the long layout) count with 0.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from prefill_cli.errors import InputError, UsageError
from prefill_cli.tools.judging.baseline import Baseline, run_baseline
from prefill_cli.tools.judging.bootstrap import Bootstrap, Tally
from prefill_cli.tools.judging.catalogue_metrics import ItemCounts
from prefill_cli.tools.judging.comparison import compare_results
from prefill_cli.tools.judging.held_out import Sought, Users, find_users
from prefill_cli.tools.judging.ids import Ints
from prefill_cli.tools.judging.panel import Panel
from prefill_cli.tools.judging.popularity import Popularity, count_histories
from prefill_cli.tools.judging.ranking_metrics import Floats
from prefill_cli.tools.judging.result_lists import Lists, Result, in_turn, open_result, read_lists
from prefill_cli.tools.judging.run_inputs import open_inputs

log = logging.getLogger(__name__)
USUAL_KS = (1, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Question:
    """What is asked of which result. Fields are the options of the command."""

    output: Path
    truth: str | None = None
    truth_file: str | None = None
    ks: tuple[int, ...] = ()  # empty: those of USUAL_KS that lists can have
    by: str | None = None
    history_column: str | None = None
    against: Path | None = None
    rbo_p: float = 0.9
    bootstrap: Bootstrap = Bootstrap()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        if self.truth_file and not (self.truth or self.by):
            raise UsageError("--truth-file needs --truth COLUMN, its column of held-out items")
        if not 0 < self.rbo_p < 1:
            raise UsageError(f"--rbo-p must lie between 0 and 1, not be {self.rbo_p}")
        if any(k < 1 for k in self.ks):
            raise UsageError(f"--top-k must be numbers from 1 on, not {min(self.ks)}")


def judge(asked: Question) -> dict[str, Any]:
    """The answer as one object.

    `truth` (who counts), `metrics` (name → k → mean, low, high), `catalogue` (name → k → value), `popularity_baseline` (the
    same two of the list of the most popular items), `segments` (the same for each value of --by), `against` (comparison.py,
    and `difference`: metrics of this result less the other's, over users with a list in both). What was not asked for, or
    cannot be known, is None.

    Raises:
        OutputError: no finished result. InputError: columns, ids and files that do not fit. UsageError: options that do not.
    """
    result = open_result(asked.output)
    ks = tuple(sorted(set(asked.ks))) or tuple(k for k in USUAL_KS if k <= result.top_k) or (1,)
    if ks[-1] > result.top_k:
        raise UsageError(f"--top-k {ks[-1]}: the lists of {asked.output} have at most {result.top_k} items")
    other = open_result(asked.against) if asked.against else None
    sought = Sought(asked.truth, asked.by, asked.truth_file)
    users = find_users(result, sought) if sought.columns else None
    evaluation = _Evaluation(replace(asked, ks=ks), result, users)
    evaluation.count_lists()
    told = evaluation.told()
    if other is not None:
        told["against"] = evaluation.against(other)
    return told


class _Evaluation:
    """One result being evaluated."""

    def __init__(self, asked: Question, result: Result, users: Users | None) -> None:
        self.asked, self.result = asked, result
        self.panel = Panel(users, asked.ks)
        self.tally, self.items = self.panel.new_tally(), ItemCounts(asked.ks)
        self.listed = np.zeros(len(self.panel.counted), bool)  # users with a list that is not empty
        self.lists = self.empty_lists = 0

    def count_lists(self) -> None:
        """The pass over the lists; then whoever counts and has none."""
        for frame, rows, values, lengths in in_turn(self._count, read_lists(self.result)):
            self.items.add(frame)
            self.lists += len(lengths)
            self.empty_lists += int(np.count_nonzero(lengths == 0))
            if values is not None:
                self.panel.add(self.tally, rows, values)
                self.listed[rows] = True
        if self.asked.truth:
            self.panel.add(self.tally, np.flatnonzero(self.panel.counted & ~self.listed))

    def _count(self, lists: Lists) -> tuple[pl.DataFrame, Ints, Floats | None, Ints]:
        rows = self.panel.rows_of(np.arange(lists.start, lists.start + len(lists)))
        frame = self.items.count(lists, self.panel.segments_of(rows))
        if not self.asked.truth:
            return frame, rows, None, lists.lengths
        who = self.panel.who_counts(np.where(lists.lengths > 0, rows, -1))
        return frame, rows[who], self.panel.values(lists.take(who), rows[who]), lists.lengths

    def against(self, other: Result) -> dict[str, Any]:
        """How another run's lists differ, and where held-out items are known, what that does to the metrics."""
        asked, panel, tally = self.asked, self.panel, self.panel.new_tally()
        ks = [k for k in asked.ks if k <= other.top_k]
        if not ks:
            raise UsageError(f"--top-k {asked.ks[0]}: the lists of {other.folder} have at most {other.top_k} items")

        def visit(ours: Lists, numbers: Ints, theirs: Lists) -> None:
            rows = panel.rows_of(numbers)
            who = panel.who_counts(rows)
            rows = rows[who]
            panel.add(tally, rows, panel.values(ours.take(who), rows) - panel.values(theirs.take(who), rows))

        told = compare_results(self.result, other, ks, asked.rbo_p, visit if asked.truth else None)
        if not asked.truth:
            return told | {"users_with_truth": None, "difference": None}
        difference = tally.summary(asked.bootstrap)
        within = {name: {str(k): values[str(k)] for k in ks} for name, values in difference.items()}
        return told | {"users_with_truth": int(tally.counts.sum()), "difference": within or None}

    def told(self) -> dict[str, Any]:
        asked = self.asked
        column, popularity, baseline = self._baseline()

        def figures(segment: int | None) -> dict[str, Any]:
            own = self._figures(self.tally, self.items, popularity, segment)
            base = self._figures(baseline.tally, baseline.items, popularity, segment) if baseline else None
            return own | {"popularity_baseline": base}

        return {
            "output": str(asked.output),
            "lists": self.lists,
            "empty_lists": self.empty_lists,
            "items": self.result.catalogue,
            "ks": list(asked.ks),
            "truth": self._who_counts(),
            "bootstrap": vars(asked.bootstrap) if asked.truth and asked.bootstrap.replicates else None,
            "history_column": column,
            **figures(None),
            "by": asked.by,
            "segments": [told | figures(i) for i, told in self._segments()] if asked.by else None,
            "against": None,
        }

    def _segments(self) -> list[tuple[int, dict[str, Any]]]:
        """Number, value and users of each segment, by value."""
        users = self.panel.users
        assert users
        sizes = np.bincount(users.segments[self.panel.counted], minlength=self.panel.segments)
        told = [(i, {"value": value, "users": int(sizes[i])}) for i, value in enumerate(users.values)]
        return sorted(told, key=lambda one: (one[1]["value"] is None, str(one[1]["value"])))

    def _figures(self, tally: Tally, items: ItemCounts, popular: Popularity | None, segment: int | None) -> dict[str, Any]:
        return {
            "metrics": (tally.summary(self.asked.bootstrap, segment) or None) if self.asked.truth else None,
            "catalogue": items.summary(self.result.catalogue, popular, segment),
        }

    def _who_counts(self) -> dict[str, Any] | None:
        panel, users, totals = self.panel, self.panel.users, self.result.manifest["totals"]
        if users is None or users.truths is None:
            return None
        no_row = totals["rejects"] + (totals["empty_lists"] if self.result.is_long else 0)
        return {
            "column": self.asked.truth,
            "source": users.source,
            "users": int(np.count_nonzero(panel.counted)),
            "without_list": int(np.count_nonzero(panel.counted & ~self.listed)),
            "without_truth": int(np.count_nonzero(np.diff(users.truths.offsets) == 0)),
            "not_in_run": panel.strangers,
            "unknown": no_row if users.source == str(self.result.folder) else 0,
        }

    def _baseline(self) -> tuple[str | None, Popularity | None, Baseline | None]:
        """The column of histories, what is popular by it, and that list's figures. None where there are no histories; a
        message says why.
        """
        exclude, missing = self.result.exclude_column, "no popularity, novelty and baseline"
        column = self.asked.history_column or exclude
        if column is None:
            log.info("%s: the run had no --exclude-column; name a --history-column of its input", missing)
            return None, None, None
        try:
            inputs = open_inputs(self.result)
            for name in {column, exclude or column}:
                inputs.check(name, of_items=True, lists_only=True)
            popularity = count_histories(inputs, column, exclude)
            return column, popularity, run_baseline(self.result, inputs, self.panel, popularity)
        except InputError as error:
            if self.asked.history_column:
                raise
            log.warning("%s: %s", missing, error)
            return None, None, None
