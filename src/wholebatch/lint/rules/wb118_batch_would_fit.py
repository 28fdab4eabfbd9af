"""Accumulation over a model and batch so small that the whole batch fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import keyword, number, positional, text
from .rule_base import Report, rule

_SMALL_PARAMETERS = 2_000_000
_SMALL_BATCH = 1024
_LARGE_PARTS = re.compile(
    r"Conv|LSTM|GRU|RNN|Transformer|Attention|Embedding|from_pretrained|create_model|models\."
    r"|load_model|timm|Encoder|Decoder"
)


@rule("batch fits anyway", level="note")
def check(file: File) -> Iterator[Report]:
    """Yield at most one note per file."""
    windows = [w for w in file.shaped("boundary", "nested") if number(w.every) is not None]
    if not windows or file.facts.mentions(_LARGE_PARTS):
        return
    layers = file.facts.made("Linear")
    sizes = [
        (number(positional(c, 0) or keyword(c, "in_features")) or 0)
        * (number(positional(c, 1) or keyword(c, "out_features")) or 0)
        for c in layers
    ]
    given = [keyword(c, "batch_size") or positional(c, 1) for c in file.facts.made("DataLoader")]
    batches = {
        number(value)
        for size in given
        for value in file.facts.assigned.get("" if size is None else text(size), [size])
    }
    batch = batches.pop() if len(batches) == 1 else None
    total = (batch or _SMALL_BATCH) * (number(windows[0].every) or 0)
    is_small = bool(sizes) and all(sizes) and sum(sizes) <= _SMALL_PARAMETERS
    if batch and is_small and total <= _SMALL_BATCH:
        yield Report(
            windows[0].backwards[0].node,
            f"a batch of {int(total)} fits this model of about {int(sum(sizes)):,} parameters at "
            "once: accumulation only costs time here; raise the batch size",
        )
