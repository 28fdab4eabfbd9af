"""A loss that compares samples of a batch with each other does not accumulate.

Each micro-batch has only its own samples as negatives: K micro-batches of n samples are not a
batch of K * n. Cache the features of the whole batch (GradCache, `wb.WholeBatch`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import keyword, last_part, text
from ..model.loss_origin import LOSS_NAME
from .rule_base import Report, rule

_COUPLED_NAME = re.compile(
    r"ClipLoss|CLIPLoss|clip_loss|InfoNCE|info_nce|NTXent|NT_Xent|nt_xent|MultipleNegatives"
    r"|SupConLoss|SigLipLoss|BiEncoderNllLoss|in_batch_neg|SimCLRLoss|ContrastiveLossWithInBatch"
)
_CACHED = re.compile(r"grad_?cache|accum_\w*features|cached_(multiple|rep|emb)", re.I)
# A product of features with features, and labels that count the samples: its diagonal.
_SIMILARITY = re.compile(r"@|matmul|einsum|\.b?mm\(|sim|logits_per|scores")
_DIAGONAL = re.compile(r"\b(arange|eye|diag)\(|tensor\((list\()?range\(")
_MESSAGE = (
    "loss uses the other samples of the micro-batch as negatives: accumulation does not give the "
    "negatives of the whole batch; cache the features (GradCache, `wb.WholeBatch`)"
)


@rule("in-batch negatives accumulated")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window."""
    if file.facts.mentions(_CACHED):
        return
    for window in file.accumulating:
        for event in window.of("call", "forward"):
            call = event.node
            if isinstance(call, ast.Call) and _couples(call, event, window):
                yield Report(call, _MESSAGE)
                break


def _couples(call: ast.Call, event: Event, window: LoopWindow) -> bool:
    """True for a loss that is known, or shown, to compare the samples of a batch."""
    name = text(call.func)
    made = [last_part(m.func) for m, _ in window.makers(name, event.env)]
    if any(map(_COUPLED_NAME.search, [last_part(call.func), *made])):
        return True
    asked = getattr(keyword(call, "return_loss"), "value", None) is True
    if event.kind == "forward" and asked and "CLIP" in window.facts.source:
        return True
    if not LOSS_NAME.search(" ".join([name, *made])):
        return False
    known = [n.id for n in ast.walk(call) if isinstance(n, ast.Name)]
    spelled = [text(call), *(text(d.expr) for n in known for d in event.env.get(n, ()))]
    resolved = [text(window.resolver.resolve(a, event.env)) for a in call.args]
    return _is_cross_entropy_of_pairs(call, " ".join([*spelled, *resolved]))


def _is_cross_entropy_of_pairs(call: ast.Call, spelled: str) -> bool:
    """True for `cross_entropy(a @ b.T, arange(n))`, whose labels are the diagonal."""
    if len(call.args) < 2 or not LOSS_NAME.search(text(call.func)):
        return False
    return bool(_DIAGONAL.search(spelled) and _SIMILARITY.search(spelled))
