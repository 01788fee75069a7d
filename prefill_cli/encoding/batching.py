"""Which prompts go through the model together."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


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
