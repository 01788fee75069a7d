"""Which prompts go through the model together."""

import logging
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)


class TokenLimit:
    """Tokens of a batch, lowered when the memory does not suffice."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def lower(self, failed: int, floor: int = 1) -> None:
        """Remember that a batch of `failed` tokens was too much; one line where that changes anything."""
        lower = max(floor, failed // 2)
        if lower < self.tokens:
            log.warning("out of memory in a batch of %d tokens; going on with at most %d", failed, lower)
            self.tokens = lower


def halves(rows: list[int]) -> tuple[list[int], list[int]]:
    """A batch that is too much, as two."""
    middle = (len(rows) + 1) // 2
    return rows[:middle], rows[middle:]


def padded_batches(lengths: npt.NDArray[np.int64], max_batch_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of each batch, longest first, so that rows × longest (the padded cells) stays within the budget.

    Longest first, because then the first batch shows the peak memory and the time that is left is never guessed too
    low. A prompt above the budget goes alone. The plan depends on the lengths and the budget only.

    lengths: [n] tokens. Yields arrays of positions in `lengths`; together they hold each position once.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, max_batch_tokens // int(lengths[order[start]]))
        yield order[start : start + rows]
        start += rows


def packed_batches(
    lengths: npt.NDArray[np.int64], max_batch_tokens: int, *, chunk: int = 1, lanes: int = 1
) -> Iterator[list[int]]:
    """Rows of each batch, so that the sum of their lengths stays within the budget and comes close to it.

    Each batch begins with the longest prompt that is left and is filled with the longest that still fit (best-fit
    decreasing), so that all but the last few are full almost to the token. A prompt above the budget goes alone. Towards
    the end batches become smaller, in steps of `chunk` tokens, so that several `lanes` that take one after another end
    together (guided self-scheduling, Polychronopoulos and Kuck 1987). The plan depends on the arguments only.

    lengths: [n] tokens. Yields lists of positions in `lengths`; together they hold each position once.
    """
    left = [int(i) for i in np.argsort(lengths, kind="stable")]
    tokens = [int(lengths[i]) for i in left]  # ascending, beside `left`
    sum_left = sum(tokens)
    while left:
        share = sum_left // (2 * lanes) if lanes > 1 else max_batch_tokens
        room = max(chunk, min(share, max_batch_tokens) // chunk * chunk)
        sum_left -= room
        batch, room = [left.pop()], room - tokens.pop()
        while (fits := bisect_right(tokens, room)) > 0:
            room -= tokens.pop(fits - 1)
            batch.append(left.pop(fits - 1))
        sum_left += room
        yield batch


def spread(n: int) -> list[int]:
    """0 … n - 1 in an order whose beginnings lie evenly over all of them (van der Corput 1935: bits read backwards)."""
    bits = max(1, (n - 1).bit_length())
    return sorted(range(n), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
