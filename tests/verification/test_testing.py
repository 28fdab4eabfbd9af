"""The assertions for people's own test suites: what they say when they fail."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests import processes
from tests.support import loss, mlp, samples
from tests.verification.window_loops import mean_of_means, right
from wholebatch.testing import assert_right_loop, assert_same_update


def test_they_pass_and_return_the_verdict() -> None:
    verdict = assert_same_update(
        mlp(dtype=torch.float32), loss, samples(20, dtype=torch.float32), micro_batch=6
    )
    assert verdict.micro_batches == 4
    assert assert_right_loop(right, case="mlp").same


def test_they_fail_with_the_whole_story() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(AssertionError) as failed:
        assert_same_update(
            model, loss, samples(20, dtype=torch.float32), micro_batch=6, batchnorm="allow"
        )
    said = str(failed.value)
    assert said.startswith("DIFFERENT update: ")
    assert "parameter" in said
    assert "BatchNorm in 1" in said
    with pytest.raises(AssertionError, match="mean of means"):
        assert_right_loop(mean_of_means, case="mlp")


def test_pytest_shows_the_message_and_the_users_own_line(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            import torch, wholebatch as wb
            from wholebatch.testing import assert_same_update

            def test_update():
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
                batch = {"x": torch.randn(11, 3), "y": torch.randint(0, 2, (11,))}
                mean = torch.nn.functional.cross_entropy
                assert_same_update(model, lambda m, b: wb.Loss(mean(m(b["x"]), b["y"]), 1), batch)
            """
        ),
        encoding="utf-8",
    )
    source = Path(wb.__file__).parents[1]
    done = processes.run(
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
        cwd=tmp_path,
        environment={"PYTHONPATH": str(source), "PATH": "", "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"^E +AssertionError: DIFFERENT update: ", done.stdout, re.M), done.stdout
    assert "mean of means" in done.stdout
    assert "testing.py" not in done.stdout.split("short test summary")[0]
