"""Ranks switch to compiled code at the same window, however long each of them compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports

WORKER = Path(__file__).with_name("beside_worker.py")


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_switch_at_the_same_window(tmp_path: Path) -> None:
    found: list[tuple[list[str], float]] = reports(WORKER, 2, tmp_path)  # type: ignore[assignment]
    (first, _), (second, _) = found
    assert first == second
    switched = first.index("compile")
    assert 6 <= switched <= 9  # Rank 1 is ready in window 6.
    assert set(first[switched:]) == {"compile"}
    assert max(error for _, error in found) <= 1e-12
