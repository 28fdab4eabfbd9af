"""The page of runs on several GPUs has the columns of the command that prints its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "ranks.md"
PRINT = """
import json, ranks
way = {"ms": 12.3, "gib": None, "update": 2e-16}
report = {
    "date": "2026-11-18", "hardware": "CPU", "ranks": 2, "machines": 1, "backend": "gloo",
    "versions": {"torch": "2.13.0"}, "commit": "abc", "parameters": 10**6, "batch": 16,
    "micro_batch": 2, "precision": "full",
    "size": {"layers": 4, "width": 128, "tokens": 64}, "ways": {"DDP": way},
}
print(json.dumps([list(ranks.HEADER), ranks.row_of(report)]))
"""


def test_rows_have_the_columns_of_the_command() -> None:
    command = [sys.executable, "-c", PRINT]
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    header, row = json.loads(done.stdout.splitlines()[-1])
    assert [cell.strip() for cell in row.strip("|").split("|")][4:7] == ["–", "12.3", "–"]
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    first, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert first == header
    assert rows
    assert {len(cells) for cells in rows} == {len(header)}
