"""Notebooks: findings name the cell, magics are tolerated, a broken cell is skipped."""

from __future__ import annotations

import json
from pathlib import Path

from wholebatch.lint import Settings, lint_paths

LOOP = """%matplotlib inline
accum = 4
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if i % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def notebook(path: Path, *cells: tuple[str, str]) -> Path:
    body = [
        {"cell_type": kind, "source": source.splitlines(keepends=True), "metadata": {}}
        for kind, source in cells
    ]
    path.write_text(json.dumps({"cells": body, "nbformat": 4, "metadata": {}}))
    return path


def test_cell_and_line(tmp_path: Path) -> None:
    file = notebook(
        tmp_path / "train.ipynb",
        ("markdown", "# Training\nwith `loss.backward()`"),
        ("code", "!pip install torch\nimport torch\nfiles = !ls\nmodel?"),
        ("code", "%%bash\necho optimizer.step()"),
        ("code", LOOP),
    )
    findings = lint_paths([str(file)], settings=Settings())
    assert [(f.cell, f.line, f.code) for f in findings] == [
        (4, 5, "WB101"),
        (4, 6, "WB109"),
        (4, 6, "WB110"),
    ]
    assert findings[0].place == f"{file}:cell 4:5:5"


def test_broken_cell_is_reported_and_the_rest_read(tmp_path: Path) -> None:
    file = notebook(tmp_path / "n.ipynb", ("code", "x = (\n"), ("code", LOOP))
    reported = [(f.cell, f.code) for f in lint_paths([str(file)], settings=Settings())]
    assert reported == [(1, "WB001"), (2, "WB101"), (2, "WB109"), (2, "WB110")]


def test_not_a_notebook(tmp_path: Path) -> None:
    file = tmp_path / "n.ipynb"
    file.write_text("[]")
    (finding,) = lint_paths([str(file)], settings=Settings())
    assert finding.code == "WB002"
    assert "is not a notebook" in finding.message
