"""Layers and losses that mix the samples of a batch: of a micro-batch they make something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import NormalFile
from ..normalise.syntax import is_call, last_part, names_in, text, values_of
from ..windows import File, Window
from ..windows.loss_terms import LOSS_NAME
from ..windows.values import unmoved
from .rule_base import NOTE, Report, rule

# Networks of torchvision that have BatchNorm.
_KNOWN_MODEL = re.compile(
    r"torchvision\.models\.(wide_)?(resnet|resnext|densenet|mobilenet|efficientnet|googlenet"
    r"|inception|regnet|shufflenet|mnasnet|vgg\d+_bn)\w*"
)
_LAYERS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm2d"}
_FREEZES = re.compile(r"FrozenBatchNorm\w*|\w*(freeze|fix|frozen)_?(bn|batch_?norm)\w*", re.I)
_COUPLED_NAME = re.compile(
    r"ClipLoss|CLIPLoss|clip_loss|InfoNCE|info_nce|NTXent|NT_Xent|nt_xent|MultipleNegatives"
    r"|SupConLoss|SigLipLoss|in_batch_neg|SimCLRLoss"
)


@rule("WB113", "BatchNorm under accumulation", NOTE)
def batchnorm(file: File) -> Iterator[Report]:
    """BatchNorm sees micro-batches, so the update is not that of the whole batch.

    Its means and variances are those of a micro-batch. Use GroupNorm, freeze it, or
    `wb.WholeBatch`, which normalises over the whole batch.
    """
    if not file.accumulating or _is_frozen(file.normal):
        return
    calls = [n for n in file.normal.index.nodes if isinstance(n, ast.Call)]
    layers = [(call, layer) for call in calls if (layer := _layer(call, file.normal))]
    for call, layer in sorted(layers, key=lambda layer: layer[0].lineno)[:1]:
        yield Report(
            call,
            f"`{layer}` normalises over each micro-batch, not over the window: the update is "
            "not that of the whole batch; use GroupNorm, freeze it, or `wb.WholeBatch`'s "
            "exact one",
            NOTE,
        )


def _layer(call: ast.Call, file: NormalFile) -> str:
    """Return the layer or network with BatchNorm that a call makes, or ""."""
    handed = [call.func, *values_of(call)] if not is_call(call, "isinstance") else []
    layers = [last_part(part) for part in handed if last_part(part) in _LAYERS]
    if not layers and "models" in text(call.func):
        known = _KNOWN_MODEL.fullmatch(file.index.full_name(call.func))
        return last_part(call.func) if known else ""
    return next(iter(layers), "")


def _is_frozen(file: NormalFile) -> bool:
    """True if the file puts BatchNorm into evaluation mode, or calls what does."""
    tests = [n for n in file.index.nodes if isinstance(n, ast.If) and "BatchNorm" in text(n.test)]
    by_hand = any("eval" in names_in(*test.body) for test in tests)
    return by_hand or any(map(_FREEZES.fullmatch, file.index.names))


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
    makers = [last_part(maker.func) for maker in window.file.reader.made_by(call.func)]
    if any(map(_COUPLED_NAME.search, [last_part(call.func), *makers])):
        return True
    is_loss = LOSS_NAME.search(" ".join([text(call.func), *makers])) and len(call.args) > 1
    return bool(is_loss) and _is_diagonal(call.args[1], window.file)


def _is_diagonal(labels: ast.expr, file: NormalFile) -> bool:
    """True for labels that count the samples: `cross_entropy(a @ b.T, arange(len(a)))`."""
    value = file.value(unmoved(file.value(labels)))
    return is_call(value, "arange", "eye")
