"""Layers and losses that mix the samples of a batch: of a micro-batch they make something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.call_kinds import constructors
from ..model.events import Env
from ..model.expressions import dotted, is_call, keyword, last_part, names_in, text
from ..model.loop_windows import unmoved
from ..model.loss_origin import LOSS_NAME
from .rule_base import Report, framework_accumulates, rule

# Networks of torchvision and timm that have BatchNorm.
_KNOWN_MODEL = re.compile(
    r"^(?!\w*_gn\b)((gluon_|legacy_)?(se|eca|sk)?_?resne[xs]?t\d+\w*|wide_resnet\w+|densenet\d+"
    r"|(tf_)?mobilenet_?v\d\w*|(tf_)?efficientnet\w+|googlenet|inception_\w+|regnet[xyz]?_\w+"
    r"|shufflenet_\w+|mnasnet\w+|vgg\d+_bn|deeplabv3_resnet\w+|fcn_resnet\w+|xception\d*"
    r"|hrnet_\w+|ghostnet_\w+|repvgg_\w+|rexnet_\w+|dla\d+)(\.\w+)?$"
)
_LAYERS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm2d"}
_COUPLED_NAME = re.compile(
    r"ClipLoss|CLIPLoss|clip_loss|InfoNCE|info_nce|NTXent|NT_Xent|nt_xent|MultipleNegatives"
    r"|SupConLoss|SigLipLoss|BiEncoderNllLoss|in_batch_neg|SimCLRLoss|ContrastiveLossWithInBatch"
)
_CACHED = re.compile(r"\w*grad_?cache\w*|accum_\w*features|cached_(multiple|rep|emb)\w*", re.I)


@rule("WB113", "BatchNorm under accumulation")
def batchnorm(file: File) -> Iterator[Report]:
    """BatchNorm sees micro-batches, so the update is not that of the whole batch.

    Its means and variances are those of a micro-batch. Use GroupNorm, freeze it, or
    `wb.WholeBatch`, which normalises over the whole batch.
    """
    windows = [w for w in file.accumulating if w.shape != "deepspeed"]
    codes = {id(w.around): w.around.nodes for w in windows if not w.is_frozen}
    if not windows and framework_accumulates(file):
        codes = {0: file.facts.nodes}
    for nodes in codes.values():
        for node in nodes:
            layer = _batchnorm(node, file) if isinstance(node, ast.expr) else ""
            if layer and not _freezes_itself(node, file):
                yield Report(
                    node,
                    f"{layer} normalises over each micro-batch, not over the window: the update is "
                    "not that of the whole batch; use GroupNorm, freeze it, or `wb.WholeBatch`'s "
                    "exact one",
                )
                return  # Once per file, where the layers are created.


def _freezes_itself(node: ast.AST, file: File) -> bool:
    """True if the class that creates the layers puts BatchNorm into evaluation mode."""
    owner = file.facts.class_around(getattr(node, "lineno", 0))
    tests = [n for n in ast.walk(owner) if isinstance(n, ast.If)] if owner is not None else []
    return any("BatchNorm" in text(test.test) and "eval" in names_in(*test.body) for test in tests)


def _batchnorm(node: ast.expr, file: File) -> str:
    """Return the layer or network with BatchNorm that an expression makes or names, or ""."""
    maker = node.func if isinstance(node, ast.Call) else node
    name, full = last_part(maker), file.facts.full_name(maker)
    if name in _LAYERS and (isinstance(node, ast.Call) or _is_value(node, file)):
        return f"`{name}`"
    if not isinstance(node, ast.Call):
        return ""
    if full == "timm.create_model":
        chosen = node.args[0] if node.args else keyword(node, "model_name")
        name = str(getattr(chosen, "value", ""))
    elif "models." not in full:
        return ""
    return f"`{name}` has BatchNorm, which" if _KNOWN_MODEL.match(name) else ""


def _is_value(node: ast.expr, file: File) -> bool:
    """True if a class of layers is given a name: `norm = nn.BatchNorm2d`."""
    return any(node is value for values in file.facts.assigned.values() for value in values)


@rule("WB114", "in-batch negatives accumulated")
def in_batch_negatives(file: File) -> Iterator[Report]:
    """A loss that compares samples of a batch with each other does not accumulate.

    Each micro-batch has only its own samples as negatives: K micro-batches of n samples are not a
    batch of K * n. Cache the features of the whole batch (GradCache, `wb.WholeBatch`).
    """
    for window in file.accumulating:
        if any(map(_CACHED.fullmatch, window.words)):
            continue
        for event in window.of("call", "forward"):
            call = event.node
            if isinstance(call, ast.Call) and _couples(call, event, window):
                yield Report(
                    call,
                    "loss uses the other samples of the micro-batch as negatives: accumulation "
                    "does not give the negatives of the whole batch; cache the features "
                    "(GradCache, `wb.WholeBatch`)",
                )
                break


def _couples(call: ast.Call, event: Event, window: LoopWindow) -> bool:
    """True for a loss that is known, or shown, to compare the samples of a batch."""
    name = text(call.func)
    makers = [last_part(m.func) for m, _ in window.makers(name, event.env)]
    if any(map(_COUPLED_NAME.search, [last_part(call.func), *makers])):
        return True
    asked = getattr(keyword(call, "return_loss"), "value", None) is True
    built = [maker for maker, _ in constructors(call.func, event.env)]
    if event.kind == "forward" and asked and any("CLIP" in maker for maker in built):
        return True
    is_loss = LOSS_NAME.search(" ".join([name, *makers])) and len(call.args) > 1
    return bool(is_loss) and _is_diagonal(call.args[1], event.env)


def _is_diagonal(labels: ast.expr, env: Env, depth: int = 0) -> bool:
    """True for labels that count the samples: `cross_entropy(a @ b.T, arange(len(a)))`."""
    labels = unmoved(labels)
    counts = is_call(labels, "tensor") and any(is_call(n, "range") for n in ast.walk(labels))
    if counts or is_call(labels, "arange", "eye", "diag"):
        return True
    defs = env.get(dotted(labels) or "", ()) if depth < 4 else ()
    return any(_is_diagonal(d.expr, d.env, depth + 1) for d in defs)
