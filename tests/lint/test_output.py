"""The three formats say the same, each in its own way."""

from __future__ import annotations

import json

from wholebatch.lint import lint_source
from wholebatch.lint.output_formats import FORMATS

SOURCE = """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if i % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
FINDINGS = lint_source(SOURCE, path="dir/train.py")


def test_the_findings() -> None:
    assert [(f.line, f.column, f.code) for f in FINDINGS] == [
        (4, 5, "WB101"),
        (5, 8, "WB109"),
        (5, 8, "WB110"),
    ]


def test_text_is_what_linters_print() -> None:
    first = FORMATS["text"](FINDINGS).splitlines()[0]
    assert first.startswith("dir/train.py:4:5 WB101 loss is not divided by `accum`")


def test_json() -> None:
    rows = json.loads(FORMATS["json"](FINDINGS))
    assert [row["code"] for row in rows] == ["WB101", "WB109", "WB110"]
    assert rows[0] == {
        "code": "WB101",
        "name": "loss not divided",
        "level": "error",
        "message": FINDINGS[0].message,
        "path": "dir/train.py",
        "cell": None,
        "line": 4,
        "column": 5,
        "end_line": 4,
    }
    assert json.loads(FORMATS["json"]([])) == []


def test_github() -> None:
    first = FORMATS["github"](FINDINGS).splitlines()[0]
    assert first.startswith("::error title=wholebatch WB101,file=dir/train.py,line=4,col=5::")
    odd = lint_source(SOURCE, path="a,b:100%.py")
    assert "file=a%2Cb%3A100%25.py," in FORMATS["github"](odd)


def test_formats_are_the_promised_ones() -> None:
    assert sorted(FORMATS) == ["github", "json", "text"]
