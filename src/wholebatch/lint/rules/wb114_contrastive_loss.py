"""A loss that compares samples of a batch with each other does not accumulate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import MODEL_NAME
from ..model.expressions import dotted, is_call, keyword, last_part, text, walk
from .rule_base import Report, framework_accumulates, framework_steps, rule

_COUPLED_NAME = re.compile(
    r"ClipLoss|CLIPLoss|clip_loss|InfoNCE|info_nce|NTXent|NT_Xent|nt_xent|MultipleNegatives"
    r"|SupConLoss|SigLipLoss|BiEncoderNllLoss|in_batch_neg|SimCLRLoss|ContrastiveLossWithInBatch"
    r"|(^|_)(MMD|mmd)(_loss|Loss)?$"
)
_MESSAGE = (
    "loss uses the other samples of the micro-batch as negatives: accumulation does not give the "
    "negatives of the whole batch; cache the features (GradCache, `wb.WholeBatch`)"
)
_CACHED = re.compile(
    r"grad_?cache|accum_\w*features|cached_(multiple|rep|emb)|accum_features", re.I
)
_SIMILARITY = re.compile(r"@|matmul|einsum|\.b?mm\(|sim|logits_per|scores")
# Labels that count the samples: the diagonal of the similarities.
_COUNTS = r"(\b(arange|linspace)|tensor\((list\()?range)\("
_DIAGONAL = re.compile(_COUNTS)
_OWN_NUMBER = re.compile(
    r"range\((0, )?([\w.]+\.(size\(0\)|size\(\)\[0\]|shape\[0\])|len\(|\w*b(atch_?)?si?ze?\b)"
)
_OF_PAIRS = re.compile(r"pytorch_metric_learning")  # Its losses are all over pairs of a batch.
# Samples that are not compared with themselves; in a method without a loss it masks weights.
_EYE = re.compile(r"\beye\([^\n]*(size\(0\)|batch|shape\[0\])")
_LOSS = re.compile(r"entropy|CrossEn|log_softmax|logsumexp|criterion|\blog\(")
_CLIP = re.compile(r"CLIP|SigLip|Clap")


@rule("in-batch negatives accumulated")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window."""
    windows = file.accumulating
    if not (windows or framework_accumulates(file)):
        return
    own = {c.node.name: c.node for c in file.facts.classes}
    built = [own[name] for m in file.models if (name := last_part(m.func)) in own]
    coupled = any(_compares(p) for m in file.models for p in file.facts.imported_parts(m, 2))
    coupled = coupled or any(_compares(text(node)) for node in built)
    for window in windows:
        losses = {id(chain.base_call) for _, chain in window.chains if coupled}
        for event in window.of("call", "forward"):
            call = event.node
            if isinstance(call, ast.Call) and (id(call) in losses or _couples(call, event, window)):
                yield from _reports(call, file)
                break
    # A framework's own accumulation: the loss is in its step, the loop is elsewhere.
    for methods, _ in framework_steps(file) if framework_accumulates(file) else ():
        calls = [n for m in methods for n in walk(m) if isinstance(n, ast.Call)]
        coupled_calls = [c for c in calls if any(map(_COUPLED_NAME.search, _made(c, file)))]
        coupled_calls += [c for c in calls if _is_coupled_function(c, file)]
        inside = [n for m in methods if _compares(text(m)) for n in walk(m)]
        coupled_calls += [c for c in inside if is_call(c, "cross_entropy", "log_softmax")]
        coupled_calls += [c for c in calls if coupled and MODEL_NAME.match(last_part(c.func))]
        yield from (r for c in coupled_calls[:1] for r in _reports(c, file))


def _is_coupled_function(call: ast.Call, file: File) -> bool:
    found = file.facts.imported(dotted(call.func) or "")
    return found is not None and "loss" in last_part(call.func) and _compares(found.text)


def _reports(node: ast.AST, file: File) -> list[Report]:
    return [] if file.facts.mentions(_CACHED) else [Report(node, _MESSAGE)]


def _made(call: ast.Call, file: File) -> list[str]:
    """Return the names of what is called and of what made it: `criterion`, and `ClipLoss`."""
    made = [v for v in file.facts.assigned.get(text(call.func), ()) if isinstance(v, ast.Call)]
    return [last_part(call.func), *(last_part(m.func) for m in made)]


def _compares(source: str) -> bool:
    """True if code computes a cross-entropy over the similarities of a batch."""
    source = re.sub(r"(?m)^\s*#.*$", "", source)
    labels = re.search(
        rf"((label|target)\w*\s*=|entropy\()[^\n]*{_COUNTS}|torch\.diag\(|CrossEn\("
        r"|\b(\w+)\.\w+\([-1, ]+\) == \3\b|\beq\((\w+), \4\.(T\b|t\(\))",  # Of the same class.
        source,
    ) or any(_EYE.search(m) and _LOSS.search(m) for m in re.split(r"\n    def ", source))
    loss = re.search(r"cross_entropy\w*\(|CrossEn(tropyLoss)?\(|log_softmax\(", source)
    pairs = re.search(r"\bsim(_\w+)?\b|similarit|scores\b|logits_per|logits\b|dot_product", source)
    products = re.search(r"\bmm\(|matmul\(|[\w)\]] *@ *\w|einsum", source)
    return bool(labels and loss and pairs and products)


def _makes_coupled(parts: list[str]) -> bool:
    """True if a factory's loss compares samples; if it has several to choose from, if all do."""
    returned = re.findall(r"return (\w+)\(", "".join(parts[:1]))
    chosen = [
        p for p in parts if any(p.startswith((f"class {r}(", f"class {r}:")) for r in returned)
    ]
    return all(map(_compares, chosen)) if len(chosen) > 1 else any(map(_compares, parts))


def _couples(call: ast.Call, event: Event, window: LoopWindow) -> bool:
    """True for a loss that is known, or shown, to compare the samples of a batch."""
    name = text(call.func)
    makers = [m for m, _ in window.makers(name, event.env)]
    made = [last_part(m.func) for m in makers]
    if window.facts.mentions(_OF_PAIRS) and any(text(m).startswith("losses.") for m in makers):
        return True
    if any(map(_COUPLED_NAME.search, [last_part(call.func), *made])):
        return True
    asked = getattr(keyword(call, "return_loss"), "value", None) is True
    if event.kind == "forward" and asked and window.facts.mentions(_CLIP):
        return True
    if any("Loss" in m for m in made) and _compares(window.facts.behind(name)):
        return True
    made_by = [m for m in makers if "loss" in text(m.func)]
    if any(_makes_coupled(window.facts.imported_parts(m, 2)) for m in made_by):
        return True
    is_loss = re.search(r"entropy|criterion|loss|ce$", " ".join([name, *made]), re.I)
    # Rows against columns, with the same labels.
    turned = len(call.args) > 1 and bool(re.search(r"\.(t\(\)|T)$", text(call.args[0])))
    return bool(is_loss) and (turned or _by_arange(call, event, window))


def _by_arange(call: ast.Call, event: Event, window: LoopWindow) -> bool:
    """True for `cross_entropy(a @ b.T, arange(n))`, whose labels are the diagonal."""
    if len(call.args) < 2:
        return False
    labels = window.resolver.resolve(call.args[1], event.env)
    made = [text(d.expr) for d in event.env.get(text(call.args[1]), ())]
    spelled = " ".join([text(call.args[1]), text(labels), *made])
    if not _DIAGONAL.search(spelled):
        return False
    if _OWN_NUMBER.search(spelled):
        return True  # The classes are the samples of the batch.
    bases = [text(n) for n in walk(call.args[0]) if isinstance(n, ast.Name)]
    shown = [text(call.args[0]), *(text(d.expr) for b in bases for d in event.env.get(b, ()))]
    return any(map(_SIMILARITY.search, shown))
