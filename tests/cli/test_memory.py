"""`wholebatch train --memory`: what is chosen, what is said, and what does not fit."""

from __future__ import annotations

import pytest

from wholebatch.cli import main


@pytest.mark.parametrize("memory", ["much", "0", "-1GiB", "1.5", "20", ""])
def test_budgets_that_mean_nothing(memory: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--memory={memory}"]) == 2
    assert "must be a size such as 20GiB" in capfd.readouterr().err
