"""Files that somebody else made: no code of theirs is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import wholebatch
from wholebatch.plain_files import read_json


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, said in (
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b"", "Expecting value"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_json(path)


def test_nothing_else_in_the_package_unpickles() -> None:
    """A new place is to be added here with its reason."""
    may = {
        "cli/checkpoints.py": "tensors and plain values, with weights_only=True",
        "cli/parallel_ranks.py": "bytes of the other ranks, with weights_only=True",
        "split_invariance/rank_jobs.py": "results of processes that it started itself",
    }
    package = Path(wholebatch.__file__).parent
    names = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"torch\.load\(|pickle\.(load|Unpickler)|weights_only=False", path.read_text())
    }
    assert names == set(may)
