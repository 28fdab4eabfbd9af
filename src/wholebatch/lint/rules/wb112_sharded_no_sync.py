"""Holding FSDP's reduction keeps a whole unsharded gradient in memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File
from ..model.events import holds_sync
from ..model.expressions import text
from .rule_base import Report, rule


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
            if holds_sync(context)
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
