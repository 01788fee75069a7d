"""How well the list of the most popular items would have done: what every recommender has to beat.

The baseline's list for a user is the most popular items (ties: the lesser id first), without those that the run excluded
for this user. It takes no heed of --candidates-column, --allow and --deny, nor of whether an item is in the catalogue.

No list is made. With p(i) the place of item i in the order of popularity, from 0, and H the excluded items of a user, item
i not in H has rank p(i) + 1 - |{h in H: p(h) < p(i)}| in the list. So only the first k + max |H| items matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefill_cli.errors import InputError
from prefill_cli.tools.judging.bootstrap import Tally
from prefill_cli.tools.judging.catalogue_metrics import ItemCounts
from prefill_cli.tools.judging.held_out import Users, read_ids, rows_of_lists
from prefill_cli.tools.judging.ids import Ints, find_ids, repeated
from prefill_cli.tools.judging.panel import Panel
from prefill_cli.tools.judging.popularity import Popularity, Seen, read_seen
from prefill_cli.tools.judging.ranking_metrics import user_values
from prefill_cli.tools.judging.result_lists import Result
from prefill_cli.tools.judging.run_inputs import RunInputs


@dataclass(frozen=True)
class Baseline:
    """What the baseline's lists gave."""

    tally: Tally
    items: ItemCounts


def run_baseline(result: Result, inputs: RunInputs, panel: Panel, popularity: Popularity) -> Baseline:
    """A pass over what the run excluded for each row.

    Raises:
        InputError: which input row is whose cannot be known.
    """
    users, ks = panel.users, panel.ks
    of_row = _rows_of_users(result, inputs, users) if users else np.full(inputs.rows, -1)
    size = min(len(popularity.items), ks[-1] + popularity.longest)
    truths = users.truths if users else None
    place = find_ids(truths.items, popularity.items.slice(0, size)) if truths else np.empty(0, np.int64)
    made = Baseline(panel.new_tally(), ItemCounts(ks))
    total = np.zeros((panel.segments + 1, size, len(ks)), np.int64)
    for seen in read_seen(inputs, result.exclude_column, popularity.items.slice(0, size)):
        rows = of_row[seen.start : seen.start + seen.rows]
        total += baseline_counts(seen, ks, panel.segments_of(rows), panel.segments + 1, size)
        if truths:
            who = panel.who_counts(rows)
            offsets, codes = truths.codes_of(rows[who])
            user, rank = baseline_hits(seen, np.repeat(who, np.diff(offsets)), place[codes], size)
            panel.add(made.tally, rows[who], user_values(np.searchsorted(who, user), rank, np.diff(offsets), ks))
    segment, at = np.nonzero(total.any(axis=2))
    made.items.add(made.items.frame(segment, popularity.items.take(at), total[segment, at]))
    return made


def _rows_of_users(result: Result, inputs: RunInputs, users: Users) -> Ints:
    """[input rows] the number of each one's user; -1: none."""
    if users.of_inputs:
        return np.arange(inputs.rows)
    if users.ids is None:
        found = np.full(inputs.rows, -1)
        found[rows_of_lists(result, inputs)] = np.arange(users.rows)
        return found
    given = read_ids(inputs, result.id_column)
    if twice := repeated(given):
        raise InputError(f"user ids of the input that occur more than once ({', '.join(map(str, twice))}) cannot be matched")
    return find_ids(given, users.ids)


def baseline_hits(seen: Seen, user: Ints, place: Ints, size: int) -> tuple[Ints, Ints]:
    """(user, rank) of held-out items in the baseline's lists, by user and then by rank.

    user, place: [truths] of which user of the batch, and where in the order of popularity of `size` items (-1: nowhere).
    """
    user, place = user[place >= 0], place[place >= 0]
    order = np.lexsort((place, user))
    user, place = user[order], place[order]
    taken, asked = seen.user * size + seen.place, user * size + place
    at = np.searchsorted(taken, asked)
    gone = np.zeros(len(asked), bool) if not len(taken) else taken[np.minimum(at, len(taken) - 1)] == asked
    begins = np.searchsorted(seen.user, user)
    return user[~gone], (place - (at - begins) + 1)[~gone]


def baseline_counts(seen: Seen, ks: Sequence[int], segments: Ints, n_segments: int, size: int) -> Ints:
    """[segments, size, ks] in how many of the baseline's lists of the batch the item at each place is.

    A list of k ends before place b = k + |{i: h_i - i < k}|, h the excluded places, ascending from h_0: before h_i there
    are h_i - i items that may stand in the list.
    """
    counts = np.zeros((n_segments, size, len(ks)), np.int64)
    nth = np.arange(len(seen.user)) - np.searchsorted(seen.user, seen.user)
    for j, k in enumerate(ks):
        inside = seen.place - nth < k
        ends = np.minimum(k + np.bincount(seen.user[inside], minlength=seen.rows), size)
        edges = np.bincount(segments * (size + 1) + ends, minlength=n_segments * (size + 1)).reshape(n_segments, -1)
        lists = edges.sum(axis=1, keepdims=True) - edges.cumsum(axis=1)  # that end after each place
        cells = segments[seen.user[inside]] * size + seen.place[inside]
        counts[:, :, j] = lists[:, :size] - np.bincount(cells, minlength=n_segments * size).reshape(n_segments, size)
    return counts
