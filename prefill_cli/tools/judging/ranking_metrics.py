"""How well lists name held-out items: the formulas, for one user after another, and where the hits are.

A user has a set T of held-out items and a list; rank i is a hit where the item there is in T; h(k) counts the hits among
the first k. A list that is shorter than k has no hit where it has no item. All as trec_eval computes them (which the
tests hold them to), with its names in brackets; a metric of many users is the mean of the users' values.

recall     h(k) / |T|                                                                     [recall_k]
precision  h(k) / k, for shorter lists too                                                [P_k]
hit_rate   1 where h(k) > 0, else 0                                                       [success_k]
ndcg       DCG / ideal DCG; DCG = sum of 1 / log2(i + 1) over the hits i <= k, the ideal
           one has hits at 1 ... min(k, |T|)                                              [ndcg_cut_k]
mrr        1 / i of the first hit i <= k, else 0                                          [recip_rank of the first k]
map        sum over the hits i <= k of h(i) / i, divided by |T| (not by min(k, |T|))      [map_cut_k]

Sources: Manning, Raghavan, Schuetze, Introduction to Information Retrieval (2008), chapter 8 (precision, recall, MAP);
Voorhees, The TREC-8 Question Answering Track Report (1999) (MRR); Jaervelin, Kekaelaeinen, Cumulated gain-based
evaluation of IR techniques, ACM TOIS 20(4) (2002), with the discount log2(i + 1) (NDCG); https://github.com/usnistgov/trec_eval.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.tools.judging.ids import Ints
from prefill_cli.tools.judging.result_lists import Lists

METRICS = ("recall", "precision", "hit_rate", "ndcg", "mrr", "map")
Floats = npt.NDArray[np.float64]
FEW = 4  # truths of a user up to which a pass over all lists for each is cheaper than sorting


def user_values(user: Ints, rank: Ints, truths: Ints, ks: Sequence[int]) -> Floats:
    """[metrics * ks, n] the value of each metric at each k, metric by metric, of n users.

    user, rank: [hits] whose list has a hit at which rank (from 1), by user and then by rank. truths: [n] |T|, at least 1.
    """
    n, longest = len(truths), max(ks)
    ideal = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(1, longest + 1) + 1))])
    first = np.searchsorted(user, user)  # the number of each user's first hit
    nth = np.arange(len(user)) - first + 1
    out = np.empty((len(METRICS), len(ks), n))
    for j, k in enumerate(ks):
        near = rank <= k
        who, i, h = user[near], rank[near], nth[near]
        found = np.bincount(who, minlength=n)
        out[0, j] = found / truths
        out[1, j] = found / k
        out[2, j] = found > 0
        out[3, j] = np.bincount(who, 1 / np.log2(i + 1), n) / ideal[np.minimum(truths, k)]
        out[4, j] = np.bincount(who, (h == 1) / i, n)
        out[5, j] = np.bincount(who, h / i, n) / truths
    return out.reshape(len(METRICS) * len(ks), n)


def find_hits(lists: Lists, offsets: Ints, truths: pa.Array) -> tuple[Ints, Ints]:
    """(user, rank) of all hits, by user and then by rank.

    offsets: [lists + 1] whose truths are where in `truths`, which are ids as as_ids gives them, each once a user.
    """
    found = pc.fill_null(pc.index_in(truths, value_set=lists.item_ids), -1)  # -1: in no list
    codes, numbers = lists.codes, found.to_numpy().astype(np.int32, copy=False)
    lengths, counts = lists.lengths, np.diff(offsets)
    most = int(counts.max(initial=0))
    if most <= FEW:
        hit = np.zeros(len(codes), bool)
        for slot in range(most):
            has = counts > slot
            truth = np.full(len(counts), -1, np.int32)
            truth[has] = numbers[offsets[:-1][has] + slot]
            hit |= codes == np.repeat(truth, lengths)
    else:
        size = len(lists.item_ids)
        keys = np.sort((np.repeat(np.arange(len(counts)), counts) * size + numbers)[numbers >= 0])
        places = np.repeat(np.arange(len(counts)), lengths) * size + codes
        hit = np.zeros(len(codes), bool)
        if len(keys):
            hit = keys[np.minimum(np.searchsorted(keys, places), len(keys) - 1)] == places
    place = np.flatnonzero(hit)
    user = np.searchsorted(lists.offsets, place, side="right") - 1
    return user, place - lists.offsets[user] + 1
