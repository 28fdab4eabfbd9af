"""A rank that dies or hangs ends the job: no other rank waits for it for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_the_job_ends_within_thirty_seconds(how: str, tmp_path: Path) -> None:
    """torchrun ends the job of a dead rank; the group's timeout, here 6 s, that of a hung one.

    Which rank's error is printed is not tested: torchrun may end a rank before it has printed its
    own, if another one fails first because of it.
    """
    note = tmp_path / "failed"
    done = torchrun(
        Path(__file__).parent / "ending_worker.py", 2, how, str(note), timeout=120, check=False
    )
    took = time.time() - float(note.read_text())
    assert done.returncode != 0
    assert took < 30.0, done.stderr[-3000:]
    if how == "hangs":
        assert "imed out" in done.stderr  # torch's own error
