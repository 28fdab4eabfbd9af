"""A CUDA graph reuses its buffers, so gradients that add up over it can be silently wrong.

Call `torch.compiler.cudagraph_mark_step_begin()` before every micro-batch, or compile with
`mode="max-autotune-no-cudagraphs"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import keyword, last_part, text
from .rule_base import Report, framework_accumulates, rule

_GRAPHED = {"reduce-overhead", "max-autotune"}
_MARKED = re.compile(r"cudagraph_mark_step_begin|triton\.cudagraphs\s*=\s*False")


@rule("CUDA graphs under accumulation")
def check(file: File) -> Iterator[Report]:
    """Yield every call that makes CUDA graphs in a file that accumulates."""
    if not (file.accumulating or framework_accumulates(file)):
        return
    for call in file.facts.calls:
        what = _graphs(call, file)
        if not what or file.facts.mentions(_MARKED):
            continue
        compiled = text(call.args[0]) if call.args else "model"
        # A part that is frozen gets no gradients.
        if f"{compiled}.requires_grad_(False)" not in file.facts.source:
            yield Report(
                call,
                f"{what} records CUDA graphs, whose gradients are overwritten by the next replay: "
                "accumulated gradients can be silently wrong; call "
                "`torch.compiler.cudagraph_mark_step_begin()` before every micro-batch, or use "
                '`mode="max-autotune-no-cudagraphs"`',
            )


def _graphs(call: ast.Call, file: File) -> str:
    name = last_part(call.func)
    if name == "make_graphed_callables":
        return "`make_graphed_callables`"
    given = keyword(call, "mode") if name == "compile" else None
    mode = getattr(given, "value", None)
    return f'`mode="{mode}"`' if mode in _GRAPHED else ""
