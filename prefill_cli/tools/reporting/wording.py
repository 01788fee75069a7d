"""Numbers, shares, times and ids as a person reads them."""

import math
from typing import Any


def count(n: int, one: str, more: str) -> str:
    """'1 row is', '2,000 rows are'."""
    return f"{n:,} {one if n == 1 else more}"


def percent(share: float) -> str:
    """A share with as many digits as tell it from nothing and from all."""
    value = 100 * share
    if 0 < value < 0.1 or 99.9 < value < 100:
        return f"{value:.2g} %" if value < 1 else f"{math.floor(100 * value) / 100:.2f} %"
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


def number(value: float) -> str:
    """A measured number, short."""
    if math.isnan(value):
        return "none"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.1f} million"


def duration(sec: float) -> str:
    if sec < 100:
        return f"{sec:.2f} s" if sec < 10 else f"{sec:.0f} s"
    minutes, seconds = divmod(round(sec), 60)
    return f"{minutes} min {seconds:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def clip(text: str, most: int = 120) -> str:
    """Text of a length that a table holds."""
    return text if len(text) <= most else text[: most - 1] + "…"


def shown_id(item: Any) -> str:
    """An id as text: binary ones too."""
    return item.decode(errors="backslashreplace") if isinstance(item, bytes) else str(item)
