"""Means over valid tokens: averaged with equal weight, short micro-batches count too much."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, Loop, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    divisor_of,
    dotted,
    is_binary,
    is_call,
    keyword,
    last_part,
    names_in,
    number,
    text,
)
from ..model.file_facts import flat_env
from ..model.loss_origin import LOSS_NAME, Chain
from ..model.surroundings import Surroundings
from ..model.window_boundary import iterated
from .rule_base import Report, framework_accumulates, framework_steps, rescales, rule

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
_WHOLE_WINDOW = re.compile(r"num_items|(total|global)_tokens|token_count|n_?tokens|num_tokens")
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


@rule("WB103", "mean of means")
def mean_of_token_means(file: File) -> Iterator[Report]:
    """Means over different numbers of valid tokens are averaged with equal weight.

    A micro-batch with few labels counts as much as one with many, so the update is not that of the
    batch. Add up sums, and divide once by the valid tokens of the whole window.

    Only plain spellings are found: a cross-entropy with an ignored label, a division by the sum of
    a mask, a masked mean by name, and a transformers language model whose labels are masked here.
    """
    yield from _in_frameworks(file)
    for window in file.accumulating:
        if "num_items_in_batch" in window.words or window.around.ask(_has_equal_counts):
            continue
        if rescales(window) and any(map(_WHOLE_WINDOW.search, window.words)):
            continue
        for event, chain in window.chains:
            alone = any(map(_has_one_sample, (window.loop, *event.loops[-1:])))
            mean = None if alone else _token_mean(chain, window)
            if mean is not None:
                yield Report(mean if hasattr(mean, "lineno") else event.node, _MESSAGE)
                break


def _has_equal_counts(around: Surroundings) -> bool:
    """True if masks hide the same number of tokens in every sample: means have equal weights."""
    if any("mask_ratio" in word or "num_mask" in word for word in around.words):
        return True
    taken = [n for n in around.nodes if isinstance(n, ast.Subscript)]
    return any(is_call(n.value, "randperm") and isinstance(n.slice, ast.Slice) for n in taken)


def _has_one_sample(loop: Loop) -> bool:
    """True for a loop over samples, not batches: `for rollout in rollouts`."""
    over = None if loop.virtual else iterated(loop)
    return bool(_SAMPLES.search(f"{dotted(loop.target) or ''} {dotted(over) or ''}"))


def _in_frameworks(file: File) -> Iterator[Report]:
    """Check the losses of classes whose means a framework averages with equal weight."""
    for methods, framework in framework_steps(file):
        around = Surroundings(file.facts.tree, file.facts)
        if framework == "Lightning":
            accumulates = framework_accumulates(file)
        else:
            accumulates = "gradient_accumulation_steps" in around.words
        gets_count = "num_items_in_batch" in names_in(*methods)
        for method in methods if accumulates and not gets_count else ():
            env = flat_env(ast.walk(method))
            means = [n for n in ast.walk(method) if _is_token_mean(n, env, around)]
            if means:
                yield Report(min(means, key=lambda n: getattr(n, "lineno", 0)), _MESSAGE)
                break


def _is_token_mean(node: ast.AST, env: Env, around: Surroundings) -> bool:
    by = divisor_of(node)
    if by is not None:
        return bool(LOSS_NAME.search(text(node))) and _is_mask_sum(by, env)
    if isinstance(node, ast.Attribute) and node.attr == "loss":
        makers = [node.value, *(d.expr for d in env.get(text(node.value), ()))]
        return any(isinstance(m, ast.Call) and _is_language_model(m, around) for m in makers)
    return isinstance(node, ast.Call) and (
        _ignores_labels(node, around) or last_part(node.func) in _MASKED_MEANS
    )


def _token_mean(chain: Chain, window: LoopWindow) -> ast.AST | None:
    """Return where a loss is made a mean over the valid tokens of one micro-batch, or None."""
    divisors = [d for d in chain.divisors if not d.elementwise]
    masks = [d for d in divisors if _is_mask_sum(d.by, d.env)]
    masks = [d for d in masks if window.is_own(d)]
    others = [d for d in divisors if d not in masks and not window.counts(d)]
    # A number of the whole window; but beside a mask of its own, a constant changes no weight.
    if any(_WHOLE_WINDOW.search(d.key) or not (masks or d.unrelated) for d in others):
        return None
    # Weighed by a number of its own, such as its share of the tokens.
    if any(window.resolver.varies(w, window.loop) for w in chain.weights):
        return None
    if masks:
        return masks[0].node
    if chain.selected and "mean" in chain.reducers:
        return chain.base
    call = chain.base_call
    if call is None:
        return None
    makers = [call, *(m for m, _ in window.makers(text(call.func), chain.base_env))]
    if any(_ignores_labels(m, window.around) for m in makers) and not _has_one_label(call):
        return chain.base
    is_masked = last_part(call.func) in _MASKED_MEANS or _is_language_model(call, window.around)
    return chain.base if is_masked else None


def _is_mask_sum(expr: ast.expr, env: Env, depth: int = 0) -> bool:
    """True for `mask.sum()`, also through names, casts, limits and `+ 1e-5`."""
    if depth > 8:
        return False
    if is_call(expr, "sum", "count_nonzero") and isinstance(expr.func, ast.Attribute):
        of_torch = dotted(expr.func.value) == "torch"
        return len(expr.args) == of_torch and not expr.keywords and bool(_MASK.search(text(expr)))
    inner: list[ast.expr] = []
    if is_binary(expr, ast.Add):
        inner = [expr.left]
    elif is_call(expr, *_SAME_NUMBER):
        owner = expr.func.value if isinstance(expr.func, ast.Attribute) else None
        inner = [owner] if owner is not None and dotted(owner) != "torch" else expr.args[:1]
    name = dotted(expr)
    parts = [(d.expr, d.env) for d in env.get(name or "", ()) if dotted(d.expr) != name]
    parts += [(part, env) for part in inner]
    return any(_is_mask_sum(part, where, depth + 1) for part, where in parts)


def _ignores_labels(call: ast.Call, around: Surroundings) -> bool:
    """True for a mean cross-entropy that leaves out labels which the file shows to be made."""
    reduction = keyword(call, "reduction")
    if reduction is not None and getattr(reduction, "value", None) != "mean":
        return False
    ignored = keyword(call, "ignore_index")
    if ignored is None:  # -100 is the default.
        return last_part(call.func) in _CROSS_ENTROPY and around.ask(_has_ignored_label)
    value = number(ignored)
    if value == -100 or last_part(ignored) == "ignore_index":  # Its own parameter, handed on.
        return around.ask(_has_ignored_label) or not around.ask(_makes_data)
    if value is None:  # A padding token by its name.
        return bool(_PADDING.search(text(ignored)))
    return value >= 0 or value in around.ask(_paddings)  # -1 is often asked for and never made.


def _paddings(around: Surroundings) -> set[float | None]:
    """Return the numbers that something is padded or filled with: `pad_right(x, pad_id=-1)`."""
    calls = [call for name, named in around.calls.items() if "full" in name for call in named]
    calls += around.calls.get("masked_fill", [])
    options = [n for n in around.nodes if isinstance(n, ast.keyword) and "pad" in (n.arg or "")]
    return {number(value) for value in (*(o.value for o in options), *(c.args[1] for c in calls))}


def _has_ignored_label(around: Surroundings) -> bool:
    """True if -100 is used other than as `ignore_index=`, as a default or in a comparison."""
    asked: set[int] = set()
    for node in around.nodes:
        if isinstance(node, ast.keyword) and node.arg in {"ignore_index", "default"}:
            asked.add(id(node.value))
        elif isinstance(node, ast.arguments):
            asked.update(map(id, [*node.defaults, *filter(None, node.kw_defaults)]))
        elif isinstance(node, ast.Compare):
            asked.update(map(id, node.comparators))
        elif isinstance(node, ast.UnaryOp) and id(node) not in asked and number(node) == -100:
            return True
    return False


def _makes_data(around: Surroundings) -> bool:
    """True if the data are made in this file, so that it would show a label that is left out."""
    bases = [b for n in around.nodes if isinstance(n, ast.ClassDef) for b in n.bases]
    return any("Dataset" in text(b) for b in bases) or any("collate" in w for w in around.words)


def _has_one_label(call: ast.Call) -> bool:
    """True for `criterion(logits, labels.squeeze())`: one label per sample is a mean over them."""
    return len(call.args) > 1 and is_call(call.args[1], "squeeze")


def _is_language_model(call: ast.Call, around: Surroundings) -> bool:
    """True for `model(**batch)` of transformers, if the code around it masks the labels."""
    name = text(call.func)
    labels = any(k.arg is None or "label" in k.arg for k in call.keywords)
    return labels and ("model" in name.lower() or "self" in name) and around.ask(_masks_labels)


def _masks_labels(around: Surroundings) -> bool:
    """True if a collator pads or masks labels, and nothing joins the samples to full length."""
    options = [k for n in around.nodes if isinstance(n, ast.Call) for k in n.keywords]
    packing = any(k.arg == "packing" and text(k.value) == "True" for k in options)
    if packing or around.words & _PACKS:
        return False
    collated = any(map(_MASKING_COLLATOR.match, around.words))
    models = any(map(_LANGUAGE_MODEL.match, around.words))
    return (collated and models) or around.ask(_has_ignored_label)
