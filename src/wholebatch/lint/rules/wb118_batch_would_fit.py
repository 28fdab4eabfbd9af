"""Gradients are accumulated although the whole batch would fit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import keyword, number, positional, walk
from .rule_base import Report, rule

_SMALL_PARAMETERS = 2_000_000
_SMALL_BATCH = 1024
_LARGE_PARTS = re.compile(
    r"Conv|LSTM|GRU|RNN|Transformer|Attention|Embedding|from_pretrained|create_model|models\."
    r"|load_model|timm|Encoder|Decoder"
)


@rule(
    "WB118",
    "batch fits anyway",
    "Accumulation over a model and batch so small that the whole batch fits.",
    level="note",
)
def check(file: File) -> Iterator[Report]:
    """Yield at most one note per file."""
    windows = file.shaped("boundary", "nested")
    if not windows or file.facts.mentions(_LARGE_PARTS):
        return
    parameters = _parameters(file)
    batch = _batch_size(file)
    for window in windows:
        steps = number(window.every) if window.every is not None else None
        if parameters is None or batch is None or steps is None:
            continue
        if parameters <= _SMALL_PARAMETERS and batch * steps <= _SMALL_BATCH:
            yield Report(
                window.backwards[0].node,
                f"a batch of {int(batch * steps)} fits this model of about {int(parameters):,} "
                "parameters at once: accumulation only costs time here; raise the batch size",
            )
            return


def _parameters(file: File) -> float | None:
    total = 0.0
    layers = file.facts.made("Linear")
    for call in layers:
        width = number(positional(call, 0) or keyword(call, "in_features"))
        height = number(positional(call, 1) or keyword(call, "out_features"))
        if width is None or height is None:
            return None
        total += width * height + height
    return total if layers else None


def _batch_size(file: File) -> float | None:
    given = [keyword(c, "batch_size") or positional(c, 1) for c in file.facts.made("DataLoader")]
    sizes = {_value(size, file) for size in given}
    return sizes.pop() if len(sizes) == 1 else None


def _value(expr: ast.expr | None, file: File) -> float | None:
    if not isinstance(expr, ast.Name):
        return number(expr)
    values = {
        number(node.value)
        for node in walk(file.tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == expr.id for t in node.targets)
    }
    return values.pop() if len(values) == 1 else None
