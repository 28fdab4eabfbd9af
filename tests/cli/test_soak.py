"""A short soak: windows with faults drawn at random end with the bits of those without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import processes
from tests.cli.helpers import environment_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_hundred_windows(tmp_path: Path) -> None:
    table = tmp_path / "soak.json"
    page = tmp_path / "soak.md"
    options = ["--windows", "200", "--no-ranks", "--seed", "3"]
    done = processes.run(
        ROOT / "scripts/soak.py",
        *(*options, "--json", str(table), "--markdown", str(page)),
        cwd=tmp_path,
        environment=environment_of(),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [row] = json.loads(table.read_text())["rows"]
    assert row["bit_identical"]
    assert row["windows"] == 200
    assert row["faults"]["resumed"] >= 2
    assert row["faults"]["out of memory in a backward"] >= 1
    assert "| at the end | **bit-identical** |" in page.read_text()
    assert "bit-identical" in done.stdout


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import soak
    import torch

    one = {"w": torch.ones(3), "list": [1, (2.0, "x")]}
    assert soak._same(one, {"w": torch.ones(3), "list": [1, (2.0, "x")]})
    assert not soak._same(one, {"w": torch.ones(3) + 1e-7, "list": [1, (2.0, "x")]})
    assert not soak._same(one, {"w": torch.ones(3), "list": [1, (2.0, "y")]})
    assert not soak._same(one, {"w": torch.ones(3)})
