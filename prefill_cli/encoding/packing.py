"""What is computed together: a shard's distinct prompts, the prefixes that they share, and the packed rows of both.

No model is needed to know it, so what a run will compute can be told, to the token, before there is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefill_cli.encoding.batching import packed_batches
from prefill_cli.encoding.prefix import Prefix, Sharing, nothing_shared, shared_prefixes

Ids = npt.NDArray[np.int32]


class Packing:
    """Distinct prompts, the prefixes that they share, and what is left of each prompt: `lengths` [n] from `starts` [n]."""

    def __init__(self, prompts: Sequence[Ids], sharing: Sharing) -> None:
        self.prompts = prompts
        self.sharing = sharing
        ends = np.array([0, *(prefix.end for prefix in sharing.prefixes)])
        self.starts = ends[sharing.of_prompt + 1]  # [n] tokens that a prompt shares
        self.lengths = np.fromiter(map(len, prompts), np.int64, len(prompts)) - self.starts  # [n] tokens of its own

    @property
    def tokens(self) -> int:
        """All that has to be computed, without filling."""
        return int(self.lengths.sum()) + sum(len(prefix.input_ids) for prefix in self.sharing.prefixes)

    def prefix_rows(self, row_tokens: int, chunk: int) -> Iterator[tuple[list[int], list[int]]]:
        """Rows that come first, one after another: prefixes, and prompts that fill up the last such row."""
        prefixes = self.sharing.prefixes
        for chain in _chains(prefixes, row_tokens):
            room = -sum(len(prefixes[i].input_ids) for i in chain) % chunk
            fitting = np.flatnonzero(self.lengths <= room) if chain[-1] == len(prefixes) - 1 else np.empty(0, int)
            yield chain, fitting[next(packed_batches(self.lengths[fitting], room), [])].tolist()

    def own_rows(self, done: Sequence[int], row_tokens: int, chunk: int, lanes: int) -> Iterator[list[int]]:
        """Rows of the prompts that are not `done`, in the order in which `lanes` take them."""
        left = np.setdiff1d(np.arange(len(self.prompts)), done)
        for batch in packed_batches(self.lengths[left], row_tokens, chunk=chunk, lanes=lanes):
            yield left[batch].tolist()

    def work(self, members: Sequence[int], prefixes: Sequence[int] = ()) -> tuple[int, int]:
        """Of a row: its tokens without filling, and the (query, key) pairs of its attention."""
        some = [self.sharing.prefixes[i] for i in prefixes]
        lengths = np.concatenate([self.lengths[list(members)], np.array([len(p.input_ids) for p in some], np.int64)])
        starts = np.concatenate([self.starts[list(members)], np.array([p.start for p in some], np.int64)])
        return int(lengths.sum()), int((lengths * starts + lengths * (lengths + 1) // 2).sum())


@dataclass(frozen=True)
class Distinct:
    """The distinct prompts in order of appearance, [n] which of them each prompt is, and [m] how often each occurs."""

    prompts: list[Ids]
    of_row: npt.NDArray[np.int64]

    @property
    def copies(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.of_row, minlength=len(self.prompts))


def distinct(input_ids: Sequence[Ids], share: bool = True) -> Distinct:
    """Equal prompts as one; without `share` every prompt is taken for another."""
    if not share:
        return Distinct(list(input_ids), np.arange(len(input_ids)))
    seen: dict[bytes, int] = {}
    of_row = np.array([seen.setdefault(ids.tobytes(), len(seen)) for ids in input_ids], np.int64)
    return Distinct([input_ids[i] for i in np.unique(of_row, return_index=True)[1]], of_row)


def packing_of(prompts: Sequence[Ids], share: bool = True) -> Packing:
    """The packing of distinct prompts."""
    return Packing(prompts, shared_prefixes(prompts) if share else nothing_shared(len(prompts)))


def unique_tokens(input_ids: Sequence[Ids]) -> int:
    """Tokens that are left where equal prompts and the prefixes that many share are computed once."""
    return packing_of(distinct(input_ids).prompts).tokens


def _chains(prefixes: Sequence[Prefix], row_tokens: int) -> Iterator[list[int]]:
    """Indices of prefixes that are computed in one row, in their order: parents first."""
    indices: list[int] = []
    tokens = 0
    for i, prefix in enumerate(prefixes):
        if indices and tokens + len(prefix.input_ids) > row_tokens:
            yield indices
            indices, tokens = [], 0
        indices.append(i)
        tokens += len(prefix.input_ids)
    if indices:
        yield indices
