"""Fixtures for pytest, which finds them by the entry point pytest11 of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def split_invariant() -> Callable[..., Any]:
    """Return `wholebatch.testing.assert_split_invariant`."""
    from wholebatch.testing import assert_split_invariant  # torch is imported by who needs it

    return assert_split_invariant
