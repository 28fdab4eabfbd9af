"""Holding FSDP's reduction keeps a whole unsharded gradient in memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import holds_sync
from ..model.expressions import text
from .rule_base import Report, rule


def _for_replicas(event: Event, window: LoopWindow) -> bool:
    """True if a setting says that the model is replicated here: `strategy == "ddp"`."""
    asked = [g.key for g in event.guards(window.loop)]
    return any(positive and "ddp" in spelled for spelled, positive in asked)


@rule("FSDP held", level="note")
def check(file: File) -> Iterator[Report]:
    """Yield at most one note per window."""
    if not file.facts.wraps_fsdp:
        return
    for window in file.accumulating:
        held: list[ast.AST] = [
            context.node
            for backward in window.backwards
            for context in backward.contexts(window.loop)
            if holds_sync(context) and not _for_replicas(backward, window)
        ]
        held += [
            e.node
            for e in window.of("fsdp_sync")
            if e.argument is not None and text(e.argument) != "True"
        ]
        for node in held[:1]:
            yield Report(
                node,
                "FSDP holds its reduction: the full unsharded gradient stays in memory until the "
                "end of the window; if that does not fit, let it reduce every micro-batch",
            )
