"""Means over different numbers of valid tokens are averaged with equal weight."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from ..model import File, Loop, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    divisor_of,
    dotted,
    is_call,
    keyword,
    last_part,
    number,
    place,
    text,
    walk,
)
from ..model.file_facts import DATA, flat_env
from ..model.loop_windows import unmoved
from ..model.loss_origin import Chain, Divisor, counted, is_whole_sum
from ..model.window_boundary import iterated
from .rule_base import RESCALED, Report, framework_accumulates, framework_steps, jax_sums, rule

_LANGUAGE_MODEL = re.compile(
    r"\w*(CausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForTokenClassification"
    r"|Seq2SeqLM|LMWithValueHead|ForPreTraining|MaskedLM)\b"
)
_MASKED_DATA = re.compile(
    r"(?<![\w.])-100(?![\w.:])|ignore_index(?!\s*=\s*-1\b)|label_pad_token_id"
    r"|DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification|WholeWordMask|Completion\w+)"
)
# Labels that are left out, whatever the model is.
_MASKED_LABELS = re.compile(
    r"(?<![\w.])-100(?![\w.%:])|masked_lm_labels|Loss\(\)\.ignore_index|(label|target)s?\w*\[[^\]\n]*\]\s*=\s*-1\b"
    r"|label\w*['\"\]]*(\.(extend|append)\(|\s*=)[ (\[]*-1(\]?\s*[*)]| for\b)"
    r"|\bpad\w*\s*=\s*-1\b|(\w\[[^\]\n]*\]|padding_value)\s*=\s*IGNORE_\w+"
)
# A model that leaves out labels itself, not one whose page speaks of -100.
_MASKS_ITSELF = re.compile(r"(full\w*\([^\n]*, |label\w*\[[^\n]*\] = |value=)-100\b")
# Sequences that are joined to full length: a collator has nothing to pad.
_PACKED = re.compile(r"packing\s*=\s*True|group_texts|ConstantLengthDataset")
# Tokens that are drawn to be guessed: another number in every batch.
_DRAWN = re.compile(r"ForMaskedLM|mlm_probability|mlm\s*=\s*True|WholeWordMask")
# Models with a label or two for each sample, or a loss per sample (CTC): a mean over samples.
_ONE_LABEL = re.compile(
    r"For(QuestionAnswering|SequenceClassif|MultipleChoice|CTC\b)|start_positions"
)
# Arguments of a model that can hold labels.
_GIVES_LABELS = re.compile(
    r"label|target|tgt|answer|batch|inputs$|^y$|sample|data|(loss|response|action)_?mask"
)
_IGNORED = re.compile(r"-100(?<![\w.]-100)(?![\w.%:])")
_JAX_MASK_COUNT = re.compile(
    r"loss\w*\([^()\n]*\bmask=|/\s*(jnp\.(maximum|clip)\()?\(?(jnp\.sum\(\w*(mask|valid|weights)|\w*(mask|valid|weights)\w*\.sum\(\))"
)
# Masks that hide the same number of tokens in every batch.
_FIXED_NUMBER = re.compile(r"randperm\([^\n]*\)\[: *\w+\]")
# Inputs and labels are slices of one stream of tokens, made here: `t[:, :-1], t[:, 1:]`.
_SHIFTED = re.compile(r"\b(\w+)\[:, :-1\][^\n]*\n?[^\n]*\b\1\[:, 1:\]")
# Made data, of which no label is left out.
_RANDOM_LABELS = re.compile(r"(label|target)s?( = |['\"]: )torch\.randint\(")
_FIXED_INDEX = re.compile(r"randperm|randint|arange|sample|choice|topk|sort|range\(|^-?\d+$|slice")
_LABELS = re.compile(r"mask|label|batch|token|encode", re.I)
# A label of -100 that is made, not one that is only asked for.
_MAKES_IGNORED = re.compile(
    r"(?<!ignore_index=)(?<!ignore_index = )(?<![!=]= )(?<![\w.])-100(?![\w.%:])|label_pad_token"
    r"|(?i:ignore|mask)\w*(_index|_id|_label)(?!\s*=)|DataCollatorFor"
)
# Numbers of tokens that count, by their names.
_VALID = re.compile(r"n_?valid|num_valid|valid_tok|(\b|\w_)mask_?(sum|count|total)")
_OF_BATCH = re.compile(r"tok(en)?s\b|valid", re.I)
_LOSSY = re.compile(r"loss|nll|\bce\b|entropy", re.I)
# A sum of ones or of lengths, not of weights or scores.
_SELECTED = re.compile(
    r"mask|valid|tok|len(gth)?s?\b|\bne\(|\beq\(|[!=]=| > |pad|ignor|active|nonzero", re.I
)
# A sample of its own for each backward: its mean is the sample's, however many tokens it has.
_ONE_SAMPLE = re.compile(r"(sample|example|item|response|completion|episode|traj\w*)$")
_SAMPLES = re.compile(r"(^|_)(rollout|episode|trajector|completion)\w*$")
# A check that the parts of a batch are equal.
_WHOLE_PARTS = re.compile(r"(assert|if)\b[^\n]*batch_?size[^\n]*%")
_MESSAGE = (
    "mean over the valid tokens of each micro-batch is averaged over micro-batches with equal "
    "weight: add up sums and divide once by the window's tokens"
)
_SPLIT = (
    "means over the parts of a split are averaged with equal weight, but the last part can be "
    "smaller: weigh each by its samples over those of the batch"
)
_EXACT = re.compile(
    r"num_items|total_tokens|global_tokens|token_count|n_?tokens|num_tokens|tgt_size"
)
_CRITERION = re.compile(r"criterion|loss|entropy|(?<![a-z])(ce|nll)(?![a-z])", re.I)
_OWN_CROSS_ENTROPY = re.compile(r"^(masked_|smooth_)?(ce|cross_entropy|nll)_loss$", re.I)
_PADDING = re.compile(r"(?i:pad)|IGNORE|-100")
_PART = re.compile(r"class \w*(Loss|Criterion|Entropy)")  # A term of another criterion.
_ASKED_LABEL = re.compile(r"ignore_index ?= ?(-\d+)")
_ASKS_DEFAULT = re.compile(r"ignore_index ?= ?-100\b")
_DEFAULT_LABEL = re.compile(r"\bignore_index(: int)? ?=")  # In a signature.
# Helpers of RLHF code: a mean over the mask of one micro-batch.
_MASKED_MEAN = re.compile(r"masked?_mean|mean_masked|agg_loss")
_CROSS_ENTROPY = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "LabelSmoothingLoss"}


@rule("mean of means")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window, and per `compute_loss` of a Trainer that accumulates."""
    yield from _in_frameworks(file)
    if (
        not file.accumulating
        or (file.facts.mentions(RESCALED) and file.facts.mentions(_EXACT))
        or "num_items_in_batch" in file.facts.source
    ):
        return
    for window in file.accumulating:
        # A term that is weighed by its tokens: the others are means over samples.
        if any(_is_weighed(chain, window) for _, chain in window.chains):
            continue
        for event, chain in window.chains:
            alone = any(map(_has_one_sample, (window.loop, *event.loops[-1:])))
            place = None if alone else _masked_mean(chain, window, file)
            if place is not None:
                node = place if hasattr(place, "lineno") else event.node
                yield Report(node, _SPLIT if _is_split(chain, window) else _MESSAGE)
                break


def _has_one_sample(loop: Loop) -> bool:
    """True for a loop over samples, not batches: `for ids, mask in rollouts`."""
    if loop.virtual:
        return False
    target = dotted(loop.target or ast.Pass()) or ""
    return bool(
        _ONE_SAMPLE.search(target) or _SAMPLES.search(dotted(iterated(loop) or ast.Pass()) or "")
    )


def _in_frameworks(file: File) -> Iterator[Report]:
    """Check losses whose means a framework averages with equal weight."""
    by_hand = ("value_and_grad", "grad") if jax_sums(file) else ()
    for call in file.facts.made("MultiSteps", *by_hand)[:1]:
        behind = (p for c in file.facts.calls for p in file.facts.imported_parts(c))
        masked = file.facts.mentions(_JAX_MASK_COUNT) or any(map(_JAX_MASK_COUNT.search, behind))
        if masked or any(_leaves_out(source, functional=True) for source in _losses(file)):
            yield Report(call, _MESSAGE)
    for methods, framework in framework_steps(file):
        if framework == "Lightning":
            counted = not framework_accumulates(file)
        else:  # transformers passes the window's tokens to `compute_loss`.
            counted = not file.trained and "gradient_accumulation_steps" not in file.facts.source
            counted = counted or any("num_items_in_batch" in text(s) for s in methods[0].body)
        read = () if counted else methods
        found: list[ast.AST] = [
            node
            for method in read
            for node in walk(method)
            if (
                isinstance(node, ast.Call)
                and (_masks_mean(node) or _ignores_by_default(node, file))
            )
            or (isinstance(node, ast.Attribute) and node.attr == "ignore_index")
            or (isinstance(node, ast.expr) and _is_masked_loss(node, method, file))
        ]
        found += [node for method in read for node in _means_over_mask(method)]
        yield from (Report(node, _MESSAGE) for node in found[:1])


def _means_over_mask(method: ast.AST) -> Iterator[ast.AST]:
    """Yield the means over a mask, `(loss * mask).sum() / mask.sum()`, that a method returns."""
    nodes = [*walk(method)]
    env = flat_env(nodes)
    wanted = {n.id for r in nodes if isinstance(r, ast.Return) for n in _names(r)}
    stmts = [n for n in nodes if isinstance(n, (ast.Assign, ast.AugAssign, ast.Return))]
    for stmt in sorted(stmts, key=lambda s: s.lineno, reverse=True):
        targets = getattr(stmt, "targets", [getattr(stmt, "target", stmt)])
        if not (isinstance(stmt, ast.Return) or any(dotted(t) in wanted for t in targets)):
            continue
        wanted |= {n.id for n in _names(stmt)}
        for node in walk(stmt) if _LOSSY.search(text(stmt)) else ():
            by = divisor_of(node)
            if by is not None and any(_is_selection_size(e) for e, _ in counted(by, env)):
                yield node
            elif isinstance(node, ast.Call) and _MASKED_MEAN.fullmatch(last_part(node.func)):
                yield from [node] if len(node.args) == 2 and not node.keywords else []


def _names(node: ast.AST) -> list[ast.Name]:
    return [n for n in walk(node) if isinstance(n, ast.Name)]


def _losses(file: File) -> list[str]:
    """Return the source of the functions that are called a loss, of this file and imported ones."""
    own = [text(f) for f in file.facts.every_function if _CRITERION.search(f.name)]
    return own + [found.text for _, found in file.facts.helpers(_CRITERION)]


def _is_masked_loss(node: ast.expr, method: ast.AST, file: File) -> bool:
    """True for the loss in `self.model(**batch)`'s output, also through a name, if labels mask."""
    first = isinstance(node, ast.Subscript) and text(node.slice) in {"0", "'loss'"}
    if not first and not (isinstance(node, ast.Attribute) and node.attr == "loss"):
        return False
    held = node.value  # type: ignore[attr-defined]
    made = [held] + [
        n.value
        for n in walk(method)
        if isinstance(n, ast.Assign) and text(n.targets[0]) == text(held)
    ]
    return any(isinstance(m, ast.Call) and _is_language_model(m, file) for m in made)


def _masked_mean(chain: Chain, window: LoopWindow, file: File) -> ast.AST | None:
    divisors = [d for d in chain.divisors if not d.elementwise]
    masks = [d for d in divisors if _counts_valid(d, window)]
    others = [d for d in divisors if d not in masks and not window.counts(d)]
    if _is_split(chain, window):
        return chain.base
    if any(_EXACT.search(d.key) or not d.unrelated for d in others):
        return None
    # Weighed by a number of its own, such as its share of the tokens.
    if any(window.resolver.varies(w, window.loop) for w in chain.weights):
        return None
    if masks:
        counts = counted(masks[0].by, masks[0].env, window.resolver.returns)
        asked = any("-100" in text(e) for e, _ in counts) and _none_ignored(file)
        return None if asked else masks[0].node
    if chain.selected and "mean" in chain.reducers:
        return chain.base
    call = chain.base_call
    if call is None:
        return None
    if _MASKED_MEAN.fullmatch(last_part(call.func)) or keyword(call, "loss_mask") is not None:
        return chain.base
    if _is_packed(call, chain, window):
        return None
    is_masked = _ignores(call, chain, window, file) or _selects(call, chain.base_env)
    return chain.base if is_masked or _is_language_model(call, file) else None


def _is_weighed(chain: Chain, window: LoopWindow) -> bool:
    """True for a term that is multiplied by the valid tokens of the micro-batch."""
    counts = [w for w in chain.weights if re.search(r"-100|tok(en)?s|valid", text(w))]
    varying = any(window.resolver.varies(w, window.loop) for w in counts)
    return varying or any(_EXACT.search(f) for f in chain.factors)


def _is_split(chain: Chain, window: LoopWindow) -> bool:
    """True for means over the parts of a split, divided by their number: the last can be short."""
    over = iterated(window.loop) if window.shape == "nested" and not chain.factors else None
    if over is None or not any(d.key == f"len({text(over)})" for d in chain.divisors):
        return False
    made = [text(d.expr) for d in window.loop.entry.get(dotted(over) or "", ())]
    parts = [m for m in made if re.search(r"\b(split|chunk|tensor_split|array_split)\(", m)]
    is_mean = "mean" in chain.reducers or not re.search(r"sum|none", text(chain.base or over))
    return bool(parts) and is_mean and not window.facts.mentions(_WHOLE_PARTS)


def _ignores(call: ast.Call, chain: Chain, window: LoopWindow, file: File) -> bool:
    """True for a cross-entropy with an ignored label and reduction "mean"."""
    name = text(call.func)
    made = [(call, chain.base_env), *window.makers(name, chain.base_env)]
    masks = "ignore_index" in file.facts.source or file.facts.mentions(_MASKED_LABELS)
    if file.facts.mentions(_RANDOM_LABELS) and not masks:
        return False
    asked = [keyword(m, "ignore_index") for m, _ in made]
    behind = file.facts.behind(name)
    # An `ignore_index` of -100 is the default: it says nothing of the data.
    asks = _ASKS_DEFAULT.search(behind) or any(a is not None and number(a) == -100 for a in asked)
    if asks and _none_ignored(file):
        return False
    if any(_masks_mean(m, env) or _ignores_by_default(m, file) for m, env in made):
        return True
    functional = bool(_CRITERION.search(name))
    imported = file.facts.imported(name) if functional else None
    by_default = imported is not None and _DEFAULT_LABEL.search(imported.text.partition(":\n")[0])
    if by_default and not (keyword(call, "ignore_index") or file.facts.mentions(_MASKED_LABELS)):
        imported = None  # It would leave labels out, but nothing here makes such labels.
    parts = [p for m, _ in made for p in file.facts.imported_parts(m) if _PART.match(p)]
    sources = [behind, "" if imported is None else imported.text, *parts]
    if any(_leaves_out(source, functional=functional) for source in sources):
        return True
    # `model.compute_loss(...)`, `model.forward_train(...)`: that method of the class.
    owner, _, method = name.rpartition(".")
    is_part = owner and (functional or method.startswith("forward"))
    source = file.facts.behind(owner) if is_part else ""
    return _leaves_out(_method(source, method), functional=functional)


def _none_ignored(file: File) -> bool:
    """True if the data are made here or in an imported module, and nowhere with a label of -100."""
    facts = file.facts
    own = {c.node.name for c in facts.classes} | {f.name for f in facts.every_function}
    seen = bool(facts.data_parts) or any(map(DATA.search, own & facts.called))
    seen = seen or any("Dataset" in base for c in facts.classes for base in c.bases)
    seen = seen or facts.mentions(_SHIFTED)
    masks = [found.text for _, found in facts.helpers(_LABELS)]
    made = any(map(_MAKES_IGNORED.search, (facts.source, *facts.data_parts, *masks)))
    return seen and not made


@lru_cache(maxsize=64)
def _method(source: str, name: str) -> str:
    """Return the source of a method out of that of its class, or ""."""
    try:
        nodes = walk(ast.parse(source)) if f"def {name}(" in source else iter(())
    except SyntaxError:
        return ""
    return next((text(n) for n in nodes if getattr(n, "name", "") == name), "")


def _counts_valid(divisor: Divisor, window: LoopWindow) -> bool:
    """True if the data of the micro-batch decide the divisor: `mask.sum()`, `batch.ntokens`."""
    if _VALID.search(f"{divisor.key} {divisor.written}"):
        return True
    for expr, env in counted(divisor.by, divisor.env, window.resolver.returns):
        resolved = window.resolver.resolve(expr, env)
        if not window.resolver.varies(resolved, window.loop):
            continue
        targets = [s for s in window.resolver.symbols_in(resolved) if s.kind == "target"]
        if _is_selection_size(expr) or (targets and place(expr) and _OF_BATCH.search(text(expr))):
            return True
    return False


def _is_selection_size(expr: ast.expr) -> bool:
    return is_whole_sum(expr) and bool(_SELECTED.search(text(expr)))


@lru_cache(maxsize=64)
def _leaves_out(source: str, *, functional: bool) -> bool:
    """True if code of another class means over the labels that it does not leave out."""
    try:
        nodes = [*walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return False
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    # A model's own `F.cross_entropy(..., ignore_index=-1)` may meet no such label.
    masks = [c for c in calls if _masks_mean(c)]
    named = [text(keyword(c, "ignore_index") or c.func).lower() for c in masks]
    if any(last_part(c.func)[0].isupper() for c in masks) or any("pad" in one for one in named):
        return True
    if functional and any(keyword(c, "ignore_index") and _is_mean(c) for c in calls):
        return True
    if any(is_call(c, "masked_select") and "mask" in text(c) for c in calls) and "loss" in source:
        return True
    env = flat_env(nodes)
    if any(_selects(c, env) for c in calls):
        return True
    for stmt in (n for n in nodes if isinstance(n, (ast.Assign, ast.AugAssign, ast.Return))):
        is_loss = _LOSSY.search(text(stmt)) or (functional and isinstance(stmt, ast.Return))
        if functional and isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Subscript):
            is_loss = is_loss or text(stmt.value.value) == text(stmt.targets[0])  # `x = x[valid]`
        parts = [*walk(stmt)] if stmt.value is not None and is_loss else []
        divisors = [by for by in map(divisor_of, parts) if by is not None]
        if any(_is_selection_size(e) for by in divisors for e, _ in counted(by, env)):
            return True
        held = [n.slice for n in parts if isinstance(n, ast.Subscript)]
        if any(re.match(r"active_|\w*(mask|valid)\w*$", dotted(h) or "") for h in held):
            return True
    return False


def _ignores_by_default(call: ast.Call, file: File) -> bool:
    """True for a cross-entropy with its default ignore_index, -100, in a file that uses it."""
    known = last_part(call.func) in {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}
    if not known or keyword(call, "ignore_index") is not None or not _is_mean(call):
        return False
    return file.facts.mentions(_IGNORED) or _data_mask(_IGNORED, file)


def _is_packed(call: ast.Call, chain: Chain, window: LoopWindow) -> bool:
    """True if the labels are a slice of the data and ignore_index a literal: none is left out."""
    ignored = keyword(call, "ignore_index")
    if len(call.args) < 2 or (ignored is not None and number(ignored) is None):
        return False
    labels = unmoved(call.args[1])
    made = [unmoved(d.expr) for d in chain.base_env.get(dotted(labels) or "", ())]
    if is_call(call.args[1], "squeeze") or any("arange(" in text(m) for m in made):
        return True  # One label per sample.
    target = window.loop.target
    batches = {dotted(e) for e in getattr(target, "elts", [target]) if e is not None}
    slices = [m for m in made if isinstance(m, ast.Subscript) and isinstance(m.slice, ast.Tuple)]
    return any(dotted(m.value) in batches - {None} for m in slices)


def _selects(call: ast.Call, env: Env) -> bool:
    """True for a mean loss over a masked selection: `criterion(logits[mask], labels[mask])`."""
    if not _CRITERION.search(text(call.func)) or not _is_mean(call):
        return False
    if len(call.args) < 2:
        return False
    picked = [a.slice for a in call.args[:2] if isinstance(a, ast.Subscript)]
    if (
        len(picked) == 2
        and {*map(type, picked)} == {ast.Name}
        and text(picked[0]) == text(picked[1])
    ):
        # `logits[m]` and `labels[m]`: a mask by any name, if it was made and is no place or sample.
        made = [text(d.expr) for d in env.get(text(picked[0]), ())]
        return bool(made) and not any("@" in m or _FIXED_INDEX.search(m) for m in made)
    # The other side has the same shape.
    return _is_selection(call.args[1], env) or _is_selection(call.args[0], env)


def _is_selection(expr: ast.expr, env: Env, depth: int = 0) -> bool:
    """True for `labels[mask]`, copied or made under an option."""
    expr = unmoved(expr)
    inner: ast.expr | None = None
    if isinstance(expr, ast.Call):
        if (dotted(expr.func) or "").startswith("torch.") and expr.args:
            inner = expr.args[0]
        elif is_call(expr, "clone") and isinstance(expr.func, ast.Attribute):
            inner = expr.func.value
    if inner is not None:
        return depth < 6 and _is_selection(inner, env, depth + 1)
    if not isinstance(expr, ast.Subscript):
        made = env.get(dotted(expr) or "", ()) if depth < 6 else ()
        return any(_is_selection(d.expr, d.env, depth + 1) for d in made)
    by = [expr.slice, *(d.expr for d in env.get(dotted(expr.slice) or "", ()))]
    return "mask" in (dotted(expr.slice) or "") or any(isinstance(b, ast.Compare) for b in by)


def _masks_mean(call: ast.Call, env: Env | None = None) -> bool:
    ignored = _handed(keyword(call, "ignore_index"), env)
    name = last_part(call.func)
    if ignored is None or not (name in _CROSS_ENTROPY or _OWN_CROSS_ENTROPY.search(name)):
        return False
    if number(ignored) is None and not _PADDING.search(text(ignored)):
        return False
    return _is_mean(call, env)


def _handed(given: ast.expr | None, env: Env | None) -> ast.expr | None:
    """Return what a caller hands to a helper's parameter of the same name, or the value itself."""
    for _ in range(4):
        if env is None or not isinstance(given, ast.Name) or _PADDING.search(given.id):
            break
        made = env.get(given.id, ())
        if len(made) != 1 or "@" in text(made[0].expr):
            break
        given, env = made[0].expr, made[0].env
    return given


def _is_mean(call: ast.Call, env: Env | None = None) -> bool:
    reduction = _handed(keyword(call, "reduction"), env)
    return reduction is None or getattr(reduction, "value", None) == "mean"


def _is_language_model(call: ast.Call, file: File) -> bool:
    if (dotted(call.func) or "").startswith(("torch.", "np.", "jnp.", "tf.")):
        return False  # An operation on labels is no model.
    handed = any("label" in text(a) for a in (*call.args, *call.keywords))
    name = text(call.func)
    if not (re.search(r"model|net|lm\b|^self$", name, re.I) or handed):
        return False
    if _CRITERION.search(name) and file.facts.behind(name):
        return False  # It was read.
    named = [k.arg or "label" for k in call.keywords]
    if len(named) > 1 and not call.args and not any(map(_GIVES_LABELS.search, named)):
        return False  # Nothing to ignore.
    if file.facts.mentions(_LANGUAGE_MODEL):
        packed = file.facts.mentions(_PACKED) and not file.facts.mentions(_IGNORED)
        packed = packed and not file.facts.mentions(_DRAWN)
        if file.facts.mentions(_MASKED_DATA) and not packed:
            return True
    elif file.facts.mentions(_ONE_LABEL):
        return False
    unmade = "-100" in file.facts.source and _none_ignored(file)
    if file.facts.mentions(_MASKED_LABELS) and not unmade:
        return True
    behind = file.facts.behind(name)
    if _MASKS_ITSELF.search(behind) or _makes_ignored(behind, file):
        return True
    return _data_mask(_MASKED_LABELS, file)


def _makes_ignored(model: str, file: File) -> bool:
    """True if the file makes the very label that the loss inside a model leaves out."""
    asked = {*_ASKED_LABEL.findall(model)} - {"-100"}
    made = [rf"full(_like)?\([^\n]*, {a}\b|\] = {a}\b|\[{a}\] \*" for a in asked]
    return any(re.search(one, file.facts.source) for one in made)


def _data_mask(pattern: re.Pattern[str], file: File) -> bool:
    """True if data of other modules leave labels out, not the same number in every batch."""
    parts = [part for part in file.facts.data_parts if pattern.search(part)]
    return any(not _FIXED_NUMBER.search(part) for part in parts)
