"""A rank that dies or hangs ends the job: no other rank waits for it for ever. It can go on."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cli.helpers import NOISY, assert_same_bits, metrics_of, newest_checkpoint
from tests.distributed.launch import torchrun

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["dies", "hangs"])
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_with_a_killed_rank_ends_with_its_line_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY, encoding="utf-8")

    def train(call: int, *arguments: str, check: bool = True) -> str:
        worker = Path(__file__).parent / "killed_worker.py"
        command = (str(tmp_path), str(call), *arguments)
        return torchrun(worker, 2, *command, check=check).stderr

    told = train(9, "noisy.py", "--out", "killed", check=False)  # in the fifth of six windows
    # torchrun names the rank that it saw end first: the killed one, or the one that waited for it.
    killed = r"rank +: 1 .*\n.*exitcode +: -9|Connection (reset|closed) by peer"
    assert re.search(killed, told), told[-3000:]
    train(0, "--resume", "--out", "killed")
    train(0, "noisy.py", "--out", "straight")
    straight, resumed = tmp_path / "straight", tmp_path / "killed"
    expected, actual = newest_checkpoint(straight), newest_checkpoint(resumed)
    for part in ("model", "optimizer", "data", "ranks"):
        assert_same_bits(expected[part], actual[part], part)
    assert metrics_of(straight) == metrics_of(resumed)
