"""BatchNorm sees micro-batches, so the update is not that of the whole batch.

Its means and variances are those of a micro-batch. Use GroupNorm, freeze it, or `wb.WholeBatch`,
which normalises over the whole batch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import dotted, keyword, last_part
from .rule_base import Report, framework_accumulates, rule

# Networks of torchvision and timm that have BatchNorm.
_KNOWN_MODEL = re.compile(
    r"^(?!\w*_gn\b)((gluon_|legacy_)?(se|eca|sk)?_?resne[xs]?t\d+\w*|wide_resnet\w+|densenet\d+"
    r"|(tf_)?mobilenet_?v\d\w*|(tf_)?efficientnet\w+|googlenet|inception_\w+|regnet[xyz]?_\w+"
    r"|shufflenet_\w+|mnasnet\w+|vgg\d+_bn|deeplabv3_resnet\w+|fcn_resnet\w+|xception\d*"
    r"|hrnet_\w+|ghostnet_\w+|repvgg_\w+|rexnet_\w+|dla\d+)(\.\w+)?$"
)
_LAYERS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm2d"}
_FROZEN = re.compile(
    r"FrozenBatchNorm|(freeze|fix|frozen)_?(bn|batch_?norm)|bn_?eval"
    r"|BatchNorm\w*\)?:?\s*\n?\s*\w+\.eval\(\)",
    re.I,
)


@rule("BatchNorm under accumulation")
def check(file: File) -> Iterator[Report]:
    """Yield one report per file, where the layers are created."""
    by_hand = any(w.shape != "deepspeed" for w in file.accumulating)
    if not by_hand and not framework_accumulates(file):
        return
    if file.facts.mentions(_FROZEN):
        return
    names = [v for values in file.facts.assigned.values() for v in values if dotted(v)]
    for node in (*file.facts.calls, *names):
        layer = _batchnorm(node, file)
        if layer:
            yield Report(
                node,
                f"{layer} normalises over each micro-batch, not over the window: the update is not "
                "that of the whole batch; use GroupNorm, freeze it, or `wb.WholeBatch`'s exact one",
            )
            return


def _batchnorm(node: ast.expr, file: File) -> str:
    """Return the layer or network with BatchNorm that an expression makes or names, or ""."""
    made = node.func if isinstance(node, ast.Call) else node
    name, full = last_part(made), dotted(made) or ""
    if name in _LAYERS:
        return f"`{name}`"
    if not isinstance(node, ast.Call):
        return ""
    is_torchvision = "models." in full or f"torchvision.models.{name}" in file.facts.imports
    if name == "create_model" and ("timm" in full or "timm.create_model" in file.facts.imports):
        given = node.args[0] if node.args else keyword(node, "model_name")
        name = str(getattr(given, "value", ""))
    elif not is_torchvision:
        return ""
    return f"`{name}` has BatchNorm, which" if _KNOWN_MODEL.match(name) else ""
