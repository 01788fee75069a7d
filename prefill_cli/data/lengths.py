"""How long prompts are, as counts in bins whose bounds are the same for every run."""

from collections import Counter
from collections.abc import Iterable


def bound(length: int) -> int:
    """The greatest length of the bin that holds `length` tokens: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on."""
    step = 1 << max(0, (length - 1).bit_length() - 3)  # four steps an octave
    return -(-length // step) * step


def histogram(lengths: Iterable[int]) -> dict[int, int]:
    """Bound → how many of the lengths fall there, ascending; only bins that hold some."""
    counts: Counter[int] = Counter()
    for length, count in Counter(lengths).items():
        counts[bound(length)] += count
    return dict(sorted(counts.items()))


def below(bound: int) -> int:
    """The greatest length that is too short for the bin with this bound."""
    return bound - (1 << max(0, (bound - 1).bit_length() - 3))
