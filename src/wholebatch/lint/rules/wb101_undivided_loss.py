"""The loss of each micro-batch is added up without division by their number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import (
    divisor_of,
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    last_part,
    number,
    text,
    walk,
)
from ..model.loss_origin import Chain, trace
from ..model.window_boundary import iterated
from .rule_base import RESCALED, Edit, Report, cleared_last, jax_sums, replaces_one, rule

_SCALING_FACTOR = re.compile(r"scale|accum|norm|inv|factor|gas|micro|steps", re.I)
# Weights of a term beside others: `(1 - ratio) * a + ratio * b` says nothing about the number.
_TERM_WEIGHT = re.compile(r"coef|(?<!1 - )(?<![\w.])[\w.]*ratio", re.I)
# TensorFlow's functions return a loss for each sample, which a tape adds up.
_PER_SAMPLE = re.compile(
    r"[a-z]_?crossentropy$|_with_logits(_v2)?$|(squared|absolute)_error$|^tf\.nn\."
)
_SCALES = re.compile(
    r"(divide|multiply|reduce_(mean|sum)|scale\w*|np\.mean)\(\s*\w*(grad|loss|ac+um|g\b)"
    r"|average_loss|grad\w* *\*"
)
_SHOWN = re.compile(r"print|avg|average|metric|epoch|time|accura|history|len\(", re.I)
_LOSS_SCALE = re.compile(r"loss_scale|scaler", re.I)
_SUMS = re.compile(r"reduction\s*=\s*['\"](sum|none)|size_average\s*=\s*False|\.sum\(", re.I)
_BY_MEAN = re.compile(r"reduction(: str)? ?= ?['\"]mean['\"]")
_SUM_OPTION = re.compile(r"\n\s+(el)?if [^\n]*== ?['\"]sum['\"]:\n[^\n]*")
_SUMMED = re.compile(
    r"reduction(\s*:\s*str)?\s*=\s*['\"]sum|size_average\s*=\s*False|torch\.sum\(\s*\w*loss[^/\n]*$"
    r"|\bloss\w*\.sum\(\)(?! */)|label_smoothed_nll_loss",
    re.M,
)
_KNOWN_MEANS = re.compile(
    r"^(torch\.nn\.functional|nn\.functional|F)\.(cross_entropy|mse_loss|nll_loss|l1_loss"
    r"|binary_cross_entropy\w*|smooth_l1_loss|huber_loss)$"
)
# Losses that are normalised over the whole window elsewhere.
_ELSEWHERE = re.compile(r"accum_\w*features|grad_?cache|num_items_in_batch", re.I)
# The size of the whole batch, handed to the loss.
_WHOLE = re.compile(
    r"(total|global|num|n|all)_\w*(tokens|items|count|batch|samples)|normali[sz]er|denom"
)
_TEMPERATURE = re.compile(r"(^|\.)(T|tau|temp\w*)$")
_CLOCK = re.compile(r"step|iter|len\(|idx|epoch|batch_?size|\bi\b", re.I)
_LOGGED = re.compile(rf"loss|{_CLOCK.pattern}", re.I)
_MEANS = re.compile(
    r"(cross_entropy|nll_loss|mse_loss|l1_loss|binary_cross_entropy\w*|huber_loss|kl_div)\("
    r"|(CrossEntropy|MSE|NLL|BCE|L1|BCEWithLogits|CTC|KLDiv|Huber)Loss\(|\bmean\(|\.loss\b|\['loss'\]"
)
_MODELISH = re.compile(
    r"model|net\b|network|crit|loss|cross_entropy|nll|mse|l1|bce|ce\b|engine", re.I
)


_ACCUMULATES = re.compile(r"grad\w*_?ac+um|ac+um\w*_?(grad|step|iter)|micro_?(step|batch)", re.I)
# Gradients, or the loss, that are divided or weighed somewhere.
_JAX_SCALES = re.compile(
    r"lambda [\w, ]+: [^\n]*[/*]|\b(\w*grad\w*|g|\w*loss\w*)\)? */|scale\(|\b1(\.0)? */|/="
)
_JAX_MESSAGE = (
    "gradients of the micro-batches are added up and never divided by their number: divide the "
    "sum before the update"
)


@rule("loss not divided", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield one report per window whose loss is never divided."""
    if file.facts.mentions(_ACCUMULATES) and not file.facts.mentions(_JAX_SCALES):
        yield from (Report(call, _JAX_MESSAGE) for call in jax_sums(file)[:1])
    for window in file.accumulating:
        if not _judged(window, file) or replaces_one(window) or cleared_last(window):
            continue
        if any(map(file.facts.mentions, (RESCALED, _ELSEWHERE))):
            continue
        part, name = _undivided_term(window), window.count_name
        event = _first_undivided(window) if part is None else None
        if part is not None:
            yield Report(
                part.node,
                f"only a part of the loss is divided by `{name}`: the gradient of the other term "
                f"is `{name}` times too large; divide the whole sum",
            )
        elif event is not None:
            yield Report(
                event.node,
                f"loss is not divided by `{name}`: gradients of the micro-batches add up to "
                f"`{name}` times the mean; divide it before the backward",
                *_fix(window, event),
            )


def _first_undivided(window: LoopWindow) -> Event | None:
    """Return the first backward of a loss that is not divided, although the others may be."""
    chains: dict[Event, list[Chain]] = {}
    for event, chain in window.chains:
        if number(chain.base) is None:  # A term that is 0 unless it is switched on.
            chains.setdefault(event, []).append(chain)
    divided = any(window.counts(d) for _, chain in window.chains for d in chain.divisors)
    if not divided and _divides_by_count(window):
        return None
    for event, ways in chains.items():
        if all(_divided_by_less(way, window) for way in ways):
            return event
        verdicts = {_undivided(way, window) for way in ways}
        certain = True in verdicts and False not in verdicts
        if certain and (not divided or _is_extra(event, window)):
            return event
    return None


def _undivided_term(window: LoopWindow) -> Event | None:
    """Return the backward of `loss / k + other`, where nothing divides the other term."""
    for event in window.backwards:
        shown = re.findall(r"[\w.]+", text(event.argument or ast.Pass()))
        for made in window.of("assign"):
            total, name = made.argument, text(made.receiver or ast.Pass())
            if is_binary(total, ast.Add) and name in shown:
                sides = (total.left, total.right)
                ways = [trace(side, made.env, window.resolver) for side in sides]
                divided = [{any(map(window.counts, c.divisors)) for c in way} for way in ways]
                if {True} in divided and {False} in divided:
                    # Not a number, what earlier micro-batches have left, or scaled otherwise.
                    other = ways[divided.index({False})][0]
                    spelled = f"{text(other.base_call or total)} {other.factors}"
                    if other.base_call is not None and not is_accumulation_name(spelled):
                        return event
    return None


def _divided_by_less(chain: Chain, window: LoopWindow) -> bool:
    """True if a loop of `k * n` micro-batches divides by `k` alone."""
    if window.shape != "nested" or not is_binary(window.every, ast.Mult):
        return False
    factors = {text(window.every.left), text(window.every.right)}
    return len(chain.divisors) == 1 and text(chain.divisors[0].expr) in factors


def _is_extra(event: Event, window: LoopWindow) -> bool:
    """True for a second loss of the same micro-batch, beside one that is divided."""
    others = [e for e in window.backwards if e is not event and not e.excludes(event)]
    return window.when(event) == "always" and bool(others)


def _judged(window: LoopWindow, file: File) -> bool:
    """True if the loop itself adds up the losses of a fixed number of micro-batches."""
    if window.shape not in {"boundary", "nested"} or not window.backwards:
        return False
    if window.boundary is not None and window.boundary.kind in {"dynamic", "accelerate"}:
        return False
    # Gradients that are cleared on every micro-batch are those of one.
    if any(window.when(zero) == "always" for zero in window.of("zero")):
        return False
    # A window whose size changes during training normalises by something else.
    if window.every is not None and window.resolver.varies(window.every, window.loop):
        return False
    return all(_plain(e, file) for e in window.backwards)


def _divides_by_count(window: LoopWindow) -> bool:
    """True if something in the loop is divided by the count: it may scale the loss."""
    done = max(e.line for e in window.backwards)
    for event in window.of("assign"):
        by = divisor_of(event.argument) if event.argument is not None else None
        if not isinstance(by, ast.Name) or not hasattr(event.node, "foreign"):
            continue
        if window.resolver.varies(window.resolver.resolve(by, event.env), window.loop):
            return True  # A helper of another module divides by a count that it is handed.
    for node in walk(window.loop.node):
        by = divisor_of(node)
        if by is None or not is_accumulation_name(text(by)):
            continue
        divided = text(node.left if isinstance(node, ast.BinOp) else node.target)  # type: ignore[attr-defined]
        # A clock, or a loss that is divided after the last backward, is only logged.
        logged = _LOGGED if node.lineno > done else _CLOCK  # type: ignore[attr-defined]
        if not logged.search(divided):
            return True
    return False


def _plain(event: Event, file: File) -> bool:
    if event.detail == "accelerate":
        return file.facts.accelerator_divides is False
    if event.detail == "tape":
        return not _divides_gradients(file)
    return event.detail in {"tensor", "native", "fabric", "lightning", "wrapper"}


def _divides_gradients(file: File) -> bool:
    """True if a file divides anything but what it shows; a quotient that nobody keeps is none."""
    for stmt in walk(file.tree):
        if isinstance(stmt, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)) and not (
            isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.BinOp)
        ):
            divisors = [by for by in map(divisor_of, walk(stmt)) if by is not None]
            divides = any(number(by) is None for by in divisors) or _SCALES.search(text(stmt))
            if divides and not _SHOWN.search(text(stmt)):
                return True
    return False


def _undivided(chain: Chain, window: LoopWindow) -> bool | None:
    """True if a way of the loss is a mean that nothing divides, False if not, None if unknown."""
    outer = [d for d in chain.divisors if not d.elementwise]
    if any(map(window.counts, chain.divisors)):
        return False
    if any(not (d.unrelated or window.is_own(d)) for d in outer):
        return False
    if any(_SCALING_FACTOR.search(f) and not _LOSS_SCALE.search(f) for f in chain.factors):
        return False
    # Or the share of the micro-batch itself.
    weighed = any(window.resolver.varies(w, window.loop) for w in chain.weights)
    if weighed or any(map(_TERM_WEIGHT.search, chain.factors)):
        return None
    is_mean = any(window.is_own(d) for d in chain.divisors)
    if chain.base is None or ({"sum", "mean"} & chain.reducers == {"sum"} and not is_mean):
        return False
    call = chain.base_call
    spelled = f"{text(chain.base)} {'' if call is None else text(call)}"
    if is_accumulation_name(spelled) or _divides_inside(chain):
        return False
    if "mean" in chain.reducers or is_mean:
        return True
    if call is None:
        return None
    if _PER_SAMPLE.search(text(call.func)):
        return False
    if _SUMS.search(spelled) or not _is_mean(call, chain, window):
        return False
    if any(_WHOLE.search(f"{k.arg}={text(k.value)}") for k in call.keywords):
        return False
    if not _MODELISH.search(text(call.func)):
        return None
    return not _may_receive_count(call, window)


def _divides_inside(chain: Chain) -> bool:
    """True if a part of the loss that is not followed is divided: `(a * b / n).mean()`."""
    divisors = [divisor_of(node) for node in walk(chain.base or ast.Pass())]
    return any(by is not None and not _TEMPERATURE.search(text(by)) for by in divisors)


def _may_receive_count(call: ast.Call, window: LoopWindow) -> bool:
    """True if the number of steps is passed inside a settings object: `loss_of(batch, args)`."""
    if window.every is None or _MODELISH.search(last_part(call.func)):
        return False
    settings = (dotted(window.every) or "").partition(".")[0]
    return bool(settings) and any(text(a) == settings for a in call.args)


def _is_mean(base: ast.Call, chain: Chain, window: LoopWindow) -> bool:
    """False if the criterion or model sums, or is of another module that shows no mean."""
    name, facts = text(base.func), window.facts
    made = [text(d.expr) for d in chain.base_env.get(name, ())]
    makers = [v for v in facts.assigned.get(name, ()) if isinstance(v, ast.Call)]
    behind = [facts.imported_parts(m) for m in makers]
    parts = [part for parts in behind for part in parts]
    # With `reduction="mean"` by default, the branch for "sum" is not taken.
    sources = [
        _SUM_OPTION.sub("", s) if _BY_MEAN.search(s) else s for s in (facts.behind(name), *parts)
    ]
    if any(map(_SUMS.search, made)) or any(map(_SUMMED.search, sources)):
        return False
    wraps = [any(text(a) == name for a in m.args) for m in makers]
    others = [parts for parts, wrapped in zip(behind, wraps, strict=True) if not wrapped]
    return not (others and all(others)) or any(map(_MEANS.search, parts))


def _fix(window: LoopWindow, event: Event) -> tuple[tuple[Edit, ...], bool]:
    """Return the edits for one plain `loss.backward()`, and True if the loss may be a sum."""
    one = len(window.backwards) == len(window.chains) == 1 and window.alone
    if not one or event.detail != "tensor":
        return (), False
    if any(map(window.counts, window.chains[0][1].divisors)):
        return (), False  # Divided by a part of the number.
    if window.boundary is not None and window.boundary.tail:
        return (), False  # The short last window has fewer: no one number is right.
    # Beside clipping on every micro-batch the division alone would not help.
    often = window.of("zero", "clip")
    if any(window.when(e) != "boundary" for e in often):
        return (), False
    argument = event.argument
    if is_call(argument, "scale") and argument.args:  # `scaler.scale(loss).backward()`
        argument = argument.args[0]
    count = _written_count(window)
    if not isinstance(argument, ast.Name) or count is None:
        return (), False
    base = window.chains[0][1].base
    is_mean = isinstance(base, ast.Call) and bool(_KNOWN_MEANS.match(text(base.func)))
    return (Edit.at("replace", argument, f"({argument.id} / {count})"),), not is_mean


def _written_count(window: LoopWindow) -> str | None:
    """Return the count as the condition spells it, so that the name is in scope."""
    over = iterated(window.loop) if window.shape == "nested" else None
    if is_call(over, "range") and len(over.args) == 1:
        return text(over.args[0]) if dotted(over.args[0]) else f"({text(over.args[0])})"
    if window.boundary is None or window.boundary.kind != "modulo":
        return None
    for node in walk(window.boundary.expr):
        if is_binary(node, ast.Mod):
            return text(node.right)
    return None
