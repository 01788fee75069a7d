"""Which token prefixes many prompts share, so that each is computed once.

The prompts' sorted order is a walk over their trie: neighbours share exactly the path to their lowest common node, so
the lengths of neighbours' common prefixes give every inner node without building the trie (the LCP intervals of a
suffix array: Abouelhoda, Kurtz and Ohlebusch, 2004).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

# A prefix is worth a sequence of its own from this many tokens saved: below, the extra tile of attention costs more.
MIN_TOKENS_SAVED = 256
# Keys and values of all prefixes stay in memory for as long as a shard is at work: 46 kB a token in a 135M model.
MAX_TOKENS_KEPT = 8_192


@dataclass(frozen=True)
class Prefix:
    """A node of the trie: `input_ids` [m] are its own tokens, at positions `start` to `end` of every prompt below it."""

    parent: int  # index of the prefix that it goes on from, -1: none
    start: int
    input_ids: Ids

    @property
    def end(self) -> int:
        return self.start + len(self.input_ids)


@dataclass(frozen=True)
class Sharing:
    """`prefixes`, parents first, and for each prompt the index of the one that it begins with, or -1."""

    prefixes: tuple[Prefix, ...]
    of_prompt: npt.NDArray[np.int64]  # [n]


def nothing_shared(prompts: int) -> Sharing:
    """For `prompts` prompts that are computed whole."""
    return Sharing((), np.full(prompts, -1))


def shared_prefixes(prompts: Sequence[Ids]) -> Sharing:
    """The prefixes of `prompts` (distinct, n arrays of at least one token) that it pays to compute once.

    Every prompt keeps at least one token of its own: the one whose hidden state is pooled.
    """
    sharing = nothing_shared(len(prompts))
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    common = [_common_length(prompts[a], prompts[b]) for a, b in pairwise(order)]
    prefixes: list[Prefix] = []
    kept = 0
    # An interval: prompts first..last of the order, and the prefix that they go on from.
    waiting = [(0, len(order) - 1, -1)]
    while waiting:
        first, last, parent = waiting.pop()
        depth = prefixes[parent].end if parent >= 0 else 0
        if sum(common[first:last]) - (last - first) * depth < MIN_TOKENS_SAVED:  # whatever is shared below, it is too little
            for i in order[first : last + 1]:
                sharing.of_prompt[i] = _with_a_token_left(prefixes, parent, len(prompts[i]))
            continue
        shared = min(common[first:last])
        if (last - first) * (shared - depth) >= MIN_TOKENS_SAVED and kept + shared <= MAX_TOKENS_KEPT:
            prefixes.append(Prefix(parent, depth, prompts[order[first]][depth:shared]))
            kept += shared  # a prefix keeps its parents' keys and values as well, end to end
            parent = len(prefixes) - 1
        # Where neighbours share no more than all of them do, the interval falls into the children of its node.
        start = first
        for i in range(first, last):
            if common[i] == shared:
                waiting.append((start, i, parent))
                start = i + 1
        waiting.append((start, last, parent))
    return Sharing(tuple(prefixes), sharing.of_prompt)


def _common_length(a: Ids, b: Ids) -> int:
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def _with_a_token_left(prefixes: Sequence[Prefix], index: int, length: int) -> int:
    """`index`, or its nearest parent that ends before a prompt of `length` tokens does."""
    while index >= 0 and prefixes[index].end >= length:
        index = prefixes[index].parent
    return index
