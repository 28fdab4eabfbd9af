"""Private names of other libraries: all listed, few, and still there."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.integrations.host_internals import INTERNALS, Internal, missing
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


def test_a_name_that_is_gone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    lost = Internal("_no_such_name", "transformers/trainer.py", "nothing")
    monkeypatch.setitem(INTERNALS, "transformers", (lost,))
    [sentence] = missing("transformers")
    assert re.match(
        r"transformers [\d.]+ has no _no_such_name in transformers/trainer.py", sentence
    )


def test_they_are_few_and_all_are_used() -> None:
    names = [one.name for internals in INTERNALS.values() for one in internals]
    assert len(names) <= 45
    text = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES.rglob("*.py"))
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
