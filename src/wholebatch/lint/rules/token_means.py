"""Means over valid tokens: averaged with equal weight, short micro-batches count too much."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..normalise import Loop, NormalFile
from ..normalise.syntax import (
    dotted,
    is_binary,
    is_call,
    keyword,
    last_part,
    names_in,
    number,
    positional,
    shown,
    text,
    written,
)
from ..windows import File, Window
from ..windows.loss_terms import Term
from ..windows.values import iterated, varies
from .rule_base import NOTE, Report, rule

_LANGUAGE_MODEL = re.compile(
    r"\w*(CausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForTokenClassification"
    r"|Seq2SeqLM|LMWithValueHead|ForPreTraining|MaskedLM)\b"
)
# Collators that pad labels with -100, or mask them.
_MASKING_COLLATOR = re.compile(
    r"label_pad_token_id$"
    r"|DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification|WholeWordMask|Completion\w+)$"
)
# Sequences that are joined to full length: a collator has nothing to pad.
_PACKS = {"group_texts", "ConstantLengthDataset"}
_PADDING = re.compile(r"(?i:pad|ignore|mask)|-100\b")
# A sum over one of these counts the valid tokens of a micro-batch.
_MASK = re.compile(r"mask|valid|tok|len(gth)?s?\b|\bne\(|[!=]=|[<>]|pad|ignor|active|nonzero", re.I)
# A sample of its own for each backward: its mean is the sample's, however many tokens it has.
_SAMPLES = re.compile(
    r"(sample|example|item|response|completion|episode|traj\w*) |(rollout|episode|trajector)\w*$"
)
_MASKED_MEANS = {"masked_mean", "mask_mean", "mean_masked", "agg_loss"}
_CROSS_ENTROPY = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}
# Calls that leave a number as it is, but for its type, device or a lower limit.
_SAME_NUMBER = {
    "clamp", "clamp_", "clamp_min", "clip", "item", "float", "int", "long", "to", "detach", "max",
    "maximum",
}  # fmt: skip
_MESSAGE = (
    "mean over the valid tokens of each micro-batch is averaged over micro-batches with equal "
    "weight: add up sums and divide once by the window's tokens"
)


@rule("WB103", "mean of means", NOTE)
def mean_of_token_means(file: File) -> Iterator[Report]:
    """Means over different numbers of valid tokens are averaged with equal weight.

    A micro-batch with few labels counts as much as one with many, so the update is not that of the
    batch. Add up sums, and divide once by the valid tokens of the whole window.

    Only plain spellings are found: a cross-entropy with an ignored label, a division by the sum of
    a mask, a masked mean by name, and a transformers language model whose labels are masked here.
    """
    labels = _Labels(file.normal)
    for window in file.accumulating:
        if window.rescales:
            continue
        for event, term in window.terms:
            loops = (window.loop, *event.loops[-1:])
            alone = any(_has_one_sample(loop, file.normal) for loop in loops)
            mean = None if alone else _token_mean(term, window, labels)
            if mean is not None:
                yield Report(mean if hasattr(mean, "lineno") else event.node, _MESSAGE, NOTE)
                break


def _has_one_sample(loop: Loop, file: NormalFile) -> bool:
    """True for a loop over samples, not batches: `for rollout in rollouts`."""
    over = None if loop.virtual else iterated(loop, file)
    return bool(_SAMPLES.search(f"{dotted(loop.target) or ''} {shown(over)}"))


def _token_mean(term: Term, window: Window, labels: _Labels) -> ast.AST | None:
    """Return where a loss is made a mean over the valid tokens of one micro-batch, or None."""
    file = window.file

    divisors = [d for d in term.divisors if not d.elementwise]
    masks = [d for d in divisors if window.is_own(d) and _is_mask_sum(d.expr, file)]
    others = [d for d in divisors if d not in masks and not window.counts(d)]
    # A number of the whole window; but beside a mask of its own, a constant changes no weight.
    if any(not (masks or window.is_unrelated(d)) or _counts_tokens(d.written) for d in others):
        return None
    # Weighed by a number of its own, such as its share of the tokens.
    if any(varies(factor, window.loop, file) for factor in term.factors):
        return None
    if masks:
        return masks[0].node
    if term.selected and term.is_mean:
        return term.base
    call = term.call
    if call is None:
        return None
    makers = [call, *(made for made, _ in file.reader.made_by(call.func))]
    if any(map(labels.ignored_by, makers)) and not _has_one_label(call):
        return term.base
    is_masked = last_part(call.func) in _MASKED_MEANS or labels.masked_by(call)
    return term.base if is_masked else None


def _counts_tokens(divisor: str) -> bool:
    return "token" in divisor.lower()


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


def _has_one_label(call: ast.Call) -> bool:
    """True for `criterion(logits, labels.squeeze())`: one label per sample is a mean over them."""
    return len(call.args) > 1 and is_call(call.args[1], "squeeze")


@dataclass(eq=False)
class _Labels:
    """What a file shows of its labels: whether some are left out of the loss."""

    file: NormalFile

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the names in the file."""
        return names_in(self.file.index.tree)

    def ignored_by(self, call: ast.Call) -> bool:
        """True for a mean cross-entropy that leaves out labels which the file shows to be made."""
        reduction = keyword(call, "reduction")
        if reduction is not None and getattr(reduction, "value", None) != "mean":
            return False
        ignored = keyword(call, "ignore_index")
        if ignored is None:  # -100 is the default.
            return last_part(call.func) in _CROSS_ENTROPY and self._has_ignored_label
        value = number(ignored)
        if value == -100 or last_part(ignored) == "ignore_index":  # Its own parameter, handed on.
            return self._has_ignored_label or not self._makes_data
        if value is None or not isinstance(written(ignored), (ast.Constant, ast.UnaryOp)):
            return bool(_PADDING.search(f"{text(ignored)} {shown(written(ignored))}"))
        # -1 is often asked for and never made.
        return value >= 0 or value in self._paddings

    def masked_by(self, call: ast.Call) -> bool:
        """True for `model(**batch)` of transformers, if the code around it masks the labels."""
        name = text(call.func)
        labels = any(k.arg is None or "label" in k.arg for k in call.keywords)
        is_model = "model" in name.lower() or "self" in name
        return labels and is_model and self._masks_labels

    @cached_property
    def _paddings(self) -> set[float | None]:
        """Return the numbers that something is padded or filled with: `pad(x, pad_id=-1)`."""
        by_name = self.file.index.calls_by_name
        calls = [call for name, named in by_name.items() if "full" in name for call in named]
        calls += by_name.get("masked_fill", [])
        options = self.file.index.options.items()
        padded = [value for name, given in options if "pad" in name for _, value in given]
        return {number(v) for v in (*padded, *(c.args[1] for c in calls if len(c.args) > 1))}

    @cached_property
    def _has_ignored_label(self) -> bool:
        """True if -100 is used other than as `ignore_index=`, as a default or in a comparison."""
        asked: set[int] = set()
        for node in self.file.index.nodes:
            if isinstance(node, ast.keyword) and node.arg in {"ignore_index", "default"}:
                asked.add(id(node.value))
            elif isinstance(node, ast.arguments):
                asked.update(map(id, [*node.defaults, *filter(None, node.kw_defaults)]))
            elif isinstance(node, ast.Compare):
                asked.update(map(id, node.comparators))
            elif isinstance(node, ast.UnaryOp) and id(node) not in asked and number(node) == -100:
                return True
        return False

    @cached_property
    def _makes_data(self) -> bool:
        """True if the data are made here, so that the file would show a label that is left out."""
        classes = self.file.index.classes.values()
        named = any("Dataset" in base for owner in classes for base in owner.bases)
        return named or any("collate" in word for word in self.words)

    @cached_property
    def _masks_labels(self) -> bool:
        """True if a collator pads or masks labels, and nothing joins the samples to full length."""
        packing = [text(value) for _, value in self.file.index.options.get("packing", ())]
        if "True" in packing or self.words & _PACKS:
            return False
        collated = any(map(_MASKING_COLLATOR.match, self.words))
        models = any(map(_LANGUAGE_MODEL.match, self.words))
        return (collated and models) or self._has_ignored_label
