"""The command that measures precision and recall on labelled files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lint_precision import main, measure, read_labels

LOOP = """
import torch.nn.functional as F
def train(model, optimizer, batches, accum, total):
    for i in range(total):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y){divided}
        loss.backward()
        if (i + {one}) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "undivided.py").write_text(LOOP.format(divided="", one=1))
    (tmp_path / "early.py").write_text(LOOP.format(divided=" / accum", one=0))
    (tmp_path / "right.py").write_text(LOOP.format(divided=" / accum", one=1))
    return tmp_path


def test_counts_by_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = "# by hand\nundivided.py WB101:7\nearly.py WB103 WB104\nright.py\n"
    (folder / "labels.txt").write_text(labels)
    assert main([str(folder), str(folder / "labels.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| WB101 | 1 | 0 | 0 | 1.00 | 1.00 |" in lines
    assert "| WB110 | 0 | 1 | 0 | 0.00 | 1.00 |" in lines
    assert "errors: 1 right, 1 wrong, precision 0.50" in lines
    assert "notes: 0 right, 0 wrong, precision 1.00" in lines
    assert "| all | 1 | 1 | 2 | 0.50 | 0.33 |" in lines
    assert "accumulating files: 3, with neither a finding nor the note: 1" in lines
    assert lines[-1] == "silent right.py"


def test_plain_files_do_not_accumulate(folder: Path) -> None:
    score = measure(folder, read_labels("right.py plain\n"))
    assert (score.accumulating, score.silent) == (0, [])


def test_an_absent_file_is_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no gone.py \(1 labelled files are absent\)"):
        measure(folder, {"gone.py": frozenset()})
