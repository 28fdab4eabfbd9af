"""Layers and losses that mix the samples of a batch: of a micro-batch they make something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import NormalFile
from ..normalise.syntax import is_call, keyword, last_part, names_in, text
from ..windows import File, Window
from ..windows.find_windows import framework_accumulates
from ..windows.loss_terms import LOSS_NAME
from ..windows.values import unmoved
from .rule_base import NOTE, Report, rule

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


@rule("WB113", "BatchNorm under accumulation", NOTE)
def batchnorm(file: File) -> Iterator[Report]:
    """BatchNorm sees micro-batches, so the update is not that of the whole batch.

    Its means and variances are those of a micro-batch. Use GroupNorm, freeze it, or
    `wb.WholeBatch`, which normalises over the whole batch.
    """
    normal, windows = file.normal, file.accumulating
    if not windows and not framework_accumulates(normal):
        return
    if windows and any(e.kind == "freeze" for e in normal.events):
        return
    for call in normal.index.calls:
        layer = _batchnorm(call, normal)
        if layer and not _freezes_itself(call, normal):
            yield Report(
                call,
                f"{layer} normalises over each micro-batch, not over the window: the update is "
                "not that of the whole batch; use GroupNorm, freeze it, or `wb.WholeBatch`'s "
                "exact one",
                NOTE,
            )
            return  # Once per file, where the layers are created.


def _freezes_itself(node: ast.AST, file: NormalFile) -> bool:
    """True if the class that creates the layers puts BatchNorm into evaluation mode."""
    owner = file.index.class_around(getattr(node, "lineno", 0))
    tests = [n for n in ast.walk(owner.node) if isinstance(n, ast.If)] if owner else []
    return any("BatchNorm" in text(test.test) and "eval" in names_in(*test.body) for test in tests)


def _batchnorm(node: ast.Call, file: NormalFile) -> str:
    """Return the layer or network with BatchNorm that an expression makes, or ""."""
    name, full = last_part(node.func), file.index.full_name(node.func)
    if name in _LAYERS:
        return f"`{name}`"
    handed = [last_part(value) for value in (*node.args, *(k.value for k in node.keywords))]
    layer = next((h for h in handed if h in _LAYERS and name != "isinstance"), "")
    if layer:
        return f"`{layer}`"
    if full == "timm.create_model":
        chosen = node.args[0] if node.args else keyword(node, "model_name")
        name = str(getattr(chosen, "value", ""))
    elif "models." not in full:
        return ""
    return f"`{name}` has BatchNorm, which" if _KNOWN_MODEL.match(name) else ""


@rule("WB114", "in-batch negatives accumulated", NOTE)
def in_batch_negatives(file: File) -> Iterator[Report]:
    """A loss that compares samples of a batch with each other does not accumulate.

    Each micro-batch has only its own samples as negatives: K micro-batches of n samples are not a
    batch of K * n. Cache the features of the whole batch (GradCache, `wb.WholeBatch`).
    """
    for window in file.accumulating:
        for event in window.of("call"):
            call = event.node
            if isinstance(call, ast.Call) and _couples(call, window):
                yield Report(
                    call,
                    "loss uses the other samples of the micro-batch as negatives: accumulation "
                    "does not give the negatives of the whole batch; cache the features "
                    "(GradCache, `wb.WholeBatch`)",
                    NOTE,
                )
                break


def _couples(call: ast.Call, window: Window) -> bool:
    """True for a loss that is known, or shown, to compare the samples of a batch."""
    file = window.file
    makers = [name.rpartition(".")[2] for name, _ in file.reader.makers(call.func)]
    if any(map(_COUPLED_NAME.search, [last_part(call.func), *makers])):
        return not _has_earlier_features(call, window)
    asked = getattr(keyword(call, "return_loss"), "value", None) is True
    if asked and any("CLIP" in name for name, _ in file.reader.makers(call.func)):
        return True
    is_loss = LOSS_NAME.search(" ".join([text(call.func), *makers])) and len(call.args) > 1
    return bool(is_loss) and _is_diagonal(call.args[1], file)


def _has_earlier_features(call: ast.Call, window: Window) -> bool:
    """True if the loss is handed features that an earlier pass over the window has made."""
    handed = [*call.args, *(k.value for k in call.keywords)]
    nodes = [n for value in handed for n in ast.walk(window.file.value(value) or value)]
    filled = [
        text(e.node.func.value)
        for e in (*window.events, *window.before)
        if isinstance(e.node, ast.Call) and isinstance(e.node.func, ast.Attribute)
        and e.node.func.attr in {"append", "update", "setdefault"}
    ]  # fmt: skip
    return any(text(node) in filled for node in nodes) or any(k.arg is None for k in call.keywords)


def _is_diagonal(labels: ast.expr, file: NormalFile) -> bool:
    """True for labels that count the samples: `cross_entropy(a @ b.T, arange(len(a)))`."""
    value = file.value(labels)
    value = file.value(unmoved(value)) if isinstance(value, ast.expr) else value
    if isinstance(value, ast.IfExp):
        return _is_diagonal(value.body, file) or _is_diagonal(value.orelse, file)
    counts = is_call(value, "tensor") and any(is_call(n, "range") for n in ast.walk(value))
    return counts or is_call(value, "arange", "eye", "diag")
