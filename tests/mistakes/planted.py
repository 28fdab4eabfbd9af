"""Mistakes that make an update other than that of the undivided batch, to be planted in a task."""

from __future__ import annotations

from tests.mistakes import planted_comparisons, planted_loops, planted_states, planted_units
from tests.mistakes.catalogue import MISTAKES, Mistake

__all__ = ["MISTAKES", "PLANTS", "Mistake"]

PLANTS = (planted_comparisons, planted_units, planted_states, planted_loops)  # in their order
