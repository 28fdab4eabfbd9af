"""A browser for all tests of this folder; `make browser-test` sees to it that there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.browser.chromium import Tab, programs, tab


@pytest.fixture(scope="session")
def browser() -> Iterator[Tab]:
    if programs() is None and not os.environ.get("BROWSER_REQUIRED"):
        pytest.skip("needs Debian's chromium and chromium-driver: make browser-test installs them")
    with tab() as opened:
        yield opened
