"""Means over valid tokens: averaged with equal weight, short micro-batches count too much."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import NormalFile
from ..normalise.syntax import (
    dotted,
    is_binary,
    is_call,
    keyword,
    last_part,
    number,
    positional,
    shown,
    text,
    written,
)
from ..windows import File, Window
from ..windows.loss_terms import Term
from ..windows.values import varies
from .rule_base import NOTE, Report, rule

_PADDING = re.compile(r"(?i:pad|ignore|mask)|-100\b")
# A sum over one of these counts the valid tokens of a micro-batch.
_MASK = re.compile(r"mask|valid|tok|len(gth)?s?\b|\bne\(|[!=]=|[<>]|pad|ignor|active|nonzero", re.I)
_MASKED_MEANS = {"masked_mean", "mask_mean", "mean_masked"}
# Collators that pad labels with -100, or mask them.
_MASKING_COLLATOR = re.compile(
    r"DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification|WholeWordMask|Completion\w+)$"
)
_CROSS_ENTROPY = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}
# Calls that leave a number as it is, but for its type, device or a lower limit.
_SAME_NUMBER = (
    "clamp", "clamp_", "clamp_min", "clip", "item", "float", "int", "long", "to", "detach", "max",
    "maximum",
)  # fmt: skip


@rule("WB103", "mean of means", NOTE)
def mean_of_token_means(file: File) -> Iterator[Report]:
    """Means over different numbers of valid tokens are averaged with equal weight.

    A micro-batch with few labels counts as much as one with many, so the update is not that of the
    batch. Add up sums, and divide once by the valid tokens of the whole window.

    Only plain spellings are found: a cross-entropy with an ignored label, a division by the sum of
    a mask, and a `masked_mean` by name.
    """
    for window in file.accumulating:
        if window.rescaled_by:
            continue
        for event, term in window.terms:
            mean = _token_mean(term, window)
            if mean is not None:
                yield Report(
                    mean if hasattr(mean, "lineno") else event.node,
                    "mean over the valid tokens of each micro-batch is averaged over micro-batches "
                    "with equal weight: add up sums and divide once by the window's tokens",
                    NOTE,
                )
                break


def _token_mean(term: Term, window: Window) -> ast.AST | None:
    """Return where a loss is made a mean over the valid tokens of one micro-batch, or None."""
    file = window.file
    divisors = [d for d in term.divisors if not d.elementwise]
    masks = [d for d in divisors if window.is_own(d) and _is_mask_sum(d.expr, file)]
    others = [d for d in divisors if d not in masks and not window.counts(d)]
    # A number of the whole window; but beside a mask of its own, a constant changes no weight.
    if any(not (masks or window.is_unrelated(d)) or "token" in d.written.lower() for d in others):
        return None
    # Weighed by a number of its own, such as its share of the tokens.
    if any(varies(factor, window.loop, file) for factor in term.factors):
        return None
    if masks:
        return masks[0].node
    call = term.call
    if call is None or last_part(call.func) in _MASKED_MEANS:
        return None if call is None else term.base
    makers = [call, *file.reader.made_by(call.func)]
    # `criterion(logits, labels.squeeze())`: one label per sample is a mean over samples.
    has_one_label = len(call.args) > 1 and is_call(call.args[1], "squeeze")
    ignores = not has_one_label and any(_ignores_labels(maker, file) for maker in makers)
    return term.base if ignores or _is_masked_model(call, file) else None


def _is_mask_sum(expr: ast.AST | None, file: NormalFile) -> bool:
    """True for `mask.sum()`, also through names, casts, limits and `+ 1e-5`."""
    expr = file.value(expr)
    if is_call(expr, "sum", "count_nonzero") and isinstance(expr.func, ast.Attribute):
        of_torch = dotted(expr.func.value) == "torch"
        named = f"{text(expr)} {shown(written(expr))}"
        return len(expr.args) == of_torch and not expr.keywords and bool(_MASK.search(named))
    if is_binary(expr, ast.Add):
        return _is_mask_sum(expr.left, file)
    if not is_call(expr, *_SAME_NUMBER):
        return False
    owner = expr.func.value if isinstance(expr.func, ast.Attribute) else None
    is_method = owner is not None and dotted(owner) != "torch"
    return _is_mask_sum(owner if is_method else positional(expr, 0), file)


def _ignores_labels(call: ast.Call, file: NormalFile) -> bool:
    """True for a mean cross-entropy that leaves out labels which the file shows to be made."""
    reduction = keyword(call, "reduction")
    if reduction is not None and getattr(reduction, "value", None) != "mean":
        return False
    ignored = keyword(call, "ignore_index")
    value = number(ignored)
    if ignored is None or value == -100:  # The default.
        return last_part(call.func) in _CROSS_ENTROPY and file.index.has_ignored_labels
    if value is None or not isinstance(written(ignored), (ast.Constant, ast.UnaryOp)):
        return bool(_PADDING.search(f"{text(ignored)} {shown(written(ignored))}"))
    return value >= 0  # -1 is often asked for and never made.


def _is_masked_model(call: ast.Call, file: NormalFile) -> bool:
    """True for `model(**batch)` of transformers, if the code around it masks the labels."""
    labels = any(k.arg is None or "label" in k.arg for k in call.keywords)
    if not labels or "model" not in text(call.func).lower():
        return False
    collated = any(map(_MASKING_COLLATOR.match, file.index.names))
    return collated or file.index.has_ignored_labels
