"""Private names of other libraries: all listed, few, and still there."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.integrations.host_internals import INTERNALS, missing
from wholebatch import integrations

SOURCES = Path(integrations.__file__).parent


@pytest.mark.parametrize("library", INTERNALS)
def test_every_name_is_there(library: str) -> None:
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    gone = list(missing(library))
    assert not gone, "\n".join(gone)


def test_they_are_few_and_all_are_used() -> None:
    names = [one.name for internals in INTERNALS.values() for one in internals]
    assert len(names) <= 45
    text = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES.rglob("*.py"))
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
