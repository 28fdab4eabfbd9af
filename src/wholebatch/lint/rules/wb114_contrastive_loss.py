"""A contrastive loss with in-batch negatives is accumulated over micro-batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import keyword, last_part, text, walk
from .rule_base import Report, framework_accumulates, rule

_COUPLED_NAME = re.compile(
    r"ClipLoss|CLIPLoss|clip_loss|InfoNCE|info_nce|NTXent|NT_Xent|nt_xent|MultipleNegatives"
    r"|SupConLoss|SigLipLoss|BiEncoderNllLoss|in_batch_neg|SimCLRLoss|ContrastiveLossWithInBatch"
)
_MESSAGE = (
    "loss uses the other samples of the micro-batch as negatives: accumulation does not give the "
    "negatives of the whole batch; cache the features (GradCache, `wb.WholeBatch`)"
)
_CACHED = re.compile(
    r"grad_?cache|accum_\w*features|cached_(multiple|rep|emb)|accum_features", re.I
)
_SIMILARITY = re.compile(r"@|matmul|einsum|\.mm\(|similarity|\.bmm\(")


@rule(
    "WB114",
    "in-batch negatives accumulated",
    "A loss that compares samples of a batch with each other does not accumulate.",
)
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window."""
    if file.facts.mentions(_CACHED):
        return
    yield from _in_training_steps(file)
    windows = file.accumulating
    coupled = bool(windows) and any(_compares(file.facts.imported_source(m)) for m in file.models)
    for window in windows:
        node = _named(window) or _by_arange(window) or (_model_loss(window) if coupled else None)
        if node is not None:
            yield Report(node, _MESSAGE)


def _in_training_steps(file: File) -> Iterator[Report]:
    """Check Lightning's own accumulation: the loss is in `training_step`, the loop is elsewhere."""
    if not framework_accumulates(file):
        return
    for owner in file.facts.classes:
        method = owner.methods.get("training_step")
        if method is None:
            continue
        for node in walk(method):
            if isinstance(node, ast.Call):
                made = owner.attributes.get(text(node.func))
                name = last_part(made.func) if isinstance(made, ast.Call) else ""
                if _COUPLED_NAME.search(last_part(node.func)) or _COUPLED_NAME.search(name):
                    yield Report(node, _MESSAGE)
                    break


def _model_loss(window: LoopWindow) -> ast.AST | None:
    """Return the call whose result is differentiated: the model computes its own loss."""
    losses = {id(chain.base_call) for _, chain in window.chains}
    return next((e.node for e in window.of("forward", "call") if id(e.node) in losses), None)


def _compares(source: str) -> bool:
    """True if a module computes a cross-entropy over the similarities of a batch."""
    labels = re.search(r"(label|target)\w*\s*=[^\n]*arange\(|torch\.diag\(|CrossEn\(", source)
    loss = re.search(r"cross_entropy\(|CrossEn(tropyLoss)?\(", source)
    pairs = re.search(r"sim_matrix|similarity|scores\b|logits_per", source)
    return bool(labels and loss and pairs and re.search(r"\bmm\(|matmul\(|@", source))


def _calls(window: LoopWindow) -> Iterator[tuple[Event, ast.Call]]:
    for event in window.events:
        if event.kind in {"call", "forward"} and isinstance(event.node, ast.Call):
            yield event, event.node


def _named(window: LoopWindow) -> ast.AST | None:
    for event, call in _calls(window):
        name = last_part(call.func)
        if _COUPLED_NAME.search(name):
            return call
        asked = getattr(keyword(call, "return_loss"), "value", None) is True
        if (
            event.kind == "forward"
            and asked
            and re.search(r"CLIP|SigLip|Clap", window.facts.source)
        ):
            return call
        for definition in event.env.get(text(call.func), ()):
            if isinstance(definition.expr, ast.Call):
                made = last_part(definition.expr.func)
                if _COUPLED_NAME.search(made) or _is_coupled_class(made, window):
                    return call
    return None


def _is_coupled_class(name: str, window: LoopWindow) -> bool:
    """True if a loss class of this file compares all samples of its batch with each other."""
    for owner in window.facts.classes:
        if owner.node.name == name and "Loss" in name:
            body = text(owner.node)
            has_labels = "arange(" in body and re.search(r"cross_entropy|CrossEntropy", body)
            return bool(has_labels and _SIMILARITY.search(body))
    return False


def _by_arange(window: LoopWindow) -> ast.AST | None:
    """Return a `cross_entropy(a @ b.T, arange(n))`, whose labels are the diagonal."""
    for event, call in _calls(window):
        if not re.search(r"cross_entropy|CrossEntropy|criterion|loss|ce$", text(call.func), re.I):
            continue
        if len(call.args) < 2:
            continue
        labels = window.resolver.resolve(call.args[1], event.env)
        spelled = " ".join(
            [text(call.args[1]), text(labels)]
            + [text(d.expr) for d in event.env.get(text(call.args[1]), ())]
        )
        if "arange(" not in spelled:
            continue
        logits = " ".join(
            [text(call.args[0])] + [text(d.expr) for d in event.env.get(_base(call.args[0]), ())]
        )
        if _SIMILARITY.search(logits) or re.search(r"sim|logits_per|scores", logits):
            return call
    return None


def _base(expr: ast.expr) -> str:
    while isinstance(expr, (ast.Attribute, ast.Call, ast.Subscript)):
        if isinstance(expr, ast.Call):
            expr = expr.func
        else:
            expr = expr.value
    if isinstance(expr, ast.BinOp):
        return _base(expr.left)
    return text(expr)
