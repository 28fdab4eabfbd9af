"""A scale beside cached features is differentiated K times, once per micro-batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import text
from .rule_base import RESCALED, Report, replaces_one, rule

_BESIDE = re.compile(r"\b(logit_scale|logit_bias|temperature|log_temp\w*)\b")
_DETACHED = re.compile(r"(logit_scale|logit_bias|temperature)\w*['\"\])]*\.detach\(\)")


@rule("counted every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield loops that put one micro-batch's features among the cached ones of the others."""
    for window in file.shaped("nested"):
        names = set(_BESIDE.findall(text(window.loop.node)))
        divided = any(window.counts(d) for _, chain in window.chains for d in chain.divisors)
        exact = names and any(map(file.facts.mentions, (RESCALED, _DETACHED)))
        if names and not exact and not divided and replaces_one(window):
            name = sorted(names)[-1]
            yield Report(
                window.backwards[0].node,
                f"every micro-batch differentiates the loss of the whole batch: `{name}` gets its "
                f"gradient `{window.count_name}` times; divide that gradient by "
                f"`{window.count_name}` before the step, or detach `{name}` in all but one",
            )
