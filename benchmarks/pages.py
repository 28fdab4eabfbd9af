"""The places of a page that benchmarks write."""

from __future__ import annotations

from collections.abc import Sequence


def written(page: str, name: str, lines: Sequence[str]) -> str:
    """Return the page with these lines between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = page.partition(begin)
    tail = rest.partition(end)[2]
    return "\n".join([head + begin, "", *lines, "", end + tail])
