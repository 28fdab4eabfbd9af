"""BatchNorm sees micro-batches, so the update is not that of the whole batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import children, dotted, is_call, keyword, last_part, text
from .rule_base import Report, framework_accumulates, rule

_FAMILIES = (
    r"(gluon_|legacy_)?(se|eca|sk)?_?resne[xs]?t\d+\w*|wide_resnet\w+|densenet\d+"
    r"|(tf_)?mobilenet_?v\d\w*|(tf_)?efficientnet\w+|googlenet|inception_\w+|regnet[xyz]?_\w+"
    r"|shufflenet_\w+|mnasnet\w+|vgg\d+_bn|deeplabv3_resnet\w+|fcn_resnet\w+|xception\d*"
    r"|hrnet_\w+|ghostnet_\w+|repvgg_\w+|rexnet_\w+|dla\d+"
)
_KNOWN_MODEL = re.compile(rf"^(?!\w*_gn\b)({_FAMILIES})(\.\w+)?$")
_LAYERS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm2d"}
_SEGMENTERS = {"Unet", "UnetPlusPlus", "FPN", "DeepLabV3", "DeepLabV3Plus", "Linknet"}
_KERAS_ACCUMULATES = re.compile(r"optimizers\.\w+\([^)]*gradient_accumulation_steps\s*=")
_TAPE = re.compile(r"GradientTape")
_ADDS_GRADIENTS = re.compile(r"\.\w*ac+um\w*\(\w*grad", re.I)
_FACTORY = re.compile(r"(create|get|build|make|load)_(\w+_)?model$")  # Any model, by its name.
_BY_NAME = re.compile(r"timm\.create_model\(|models\.__dict__\[|getattr\((torchvision\.)?models,")
_BY_DEFAULT = re.compile(r"name\w* ?= ?['\"]([\w.]+)['\"]")
_CHOICE = re.compile(r"\n\s+if [^\n]*(type|name|arch|model)\b[^\n]*==")
_FROZEN = re.compile(
    r"FrozenBatchNorm|freeze_?bn|freeze_batch_?norm|bn_?eval|BatchNorm\w*\)?:?\s*\n?\s*\w+\.eval\(\)"
    r"|set_bn_eval|fix_bn|frozen_bn",
    re.I,
)


@rule("BatchNorm under accumulation")
def check(file: File) -> Iterator[Report]:
    """Yield one report per file, where the layers are created."""
    if not file.windows and _keras_accumulates(file):
        pass  # The optimizer, or a base class, adds up the gradients of its calls.
    elif not any(w.shape != "deepspeed" for w in file.accumulating) and not framework_accumulates(
        file
    ):
        return
    names = [v for values in file.facts.assigned.values() for v in values if dotted(v)]
    for call in (*file.facts.calls, *names):
        what = _batchnorm(call, file)
        if what and file.facts.mentions(_FROZEN):
            return
        if what:
            yield Report(
                call,
                f"{what} normalises over each micro-batch, not over the window: the update is not "
                "that of the whole batch; use GroupNorm, freeze it, or `wb.WholeBatch`'s exact one",
            )
            return


def _keras_accumulates(file: File) -> bool:
    """True if Keras's optimizer adds up gradients, or a step hands its own to what does."""
    taped = file.facts.mentions(_TAPE) and file.facts.mentions(_ADDS_GRADIENTS)
    return taped or file.facts.mentions(_KERAS_ACCUMULATES)


def _batchnorm(call: ast.expr, file: File) -> str:
    if not isinstance(call, ast.Call):
        # `norm_class = nn.BatchNorm2d`
        return f"`{last_part(call)}`" if last_part(call) in _LAYERS else ""
    name = last_part(call.func)
    if name == "BatchNormalization" and (_keras_accumulates(file) or file.accumulating):
        return "`BatchNormalization`"
    if name in _LAYERS:
        return f"`{name}`"
    if name == "convert_sync_batchnorm" and not any(map(_FACTORY.match, file.facts.called)):
        return "the model's BatchNorm"
    model = _known_model(call, name, dotted(call.func) or "", file)
    is_model = not model and call in file.models
    parts = file.facts.imported_parts(call, 2) if is_model else []
    # One of several models, or CLIP, which is built with a ResNet or a vision transformer.
    chosen = any(re.search(r"Vis\w+Transformer\(", part) for part in parts) or (
        bool(parts) and parts[0].startswith("def ") and bool(_CHOICE.search(parts[0]))
    )
    if not chosen and any(map(_always_built, parts)):
        model = name
    return f"`{model}` has BatchNorm, which" if model else ""


def _always_built(part: str) -> bool:
    """True if code makes BatchNorm in every layer, or in all that ask for it by `if bn`."""
    try:
        nodes: list[ast.AST] = [ast.parse(part)] if "BatchNorm" in part else []
    except SyntaxError:
        return False
    while nodes:
        node = nodes.pop()
        asked = isinstance(node, (ast.If, ast.IfExp)) and not (
            re.search("bn|norm|conv", text(node.test))
            or (isinstance(node, ast.IfExp) and "Identity" in text(node))
        )
        if isinstance(node, (ast.Name, ast.Attribute)) and last_part(node) in _LAYERS:
            return True
        # One choice of several, or a default.
        if not (asked or isinstance(node, (ast.Dict, ast.arguments)) or is_call(node, "dict")):
            nodes += children(node)
    return False


def _known_model(call: ast.Call, name: str, full: str, file: File) -> str:
    """Return the name of the model that a call builds if it is known to have BatchNorm, or ""."""
    if _KNOWN_MODEL.match(name):
        imported = {f"torchvision.models.{name}", f"torchvision.models.segmentation.{name}"}
        return name if "models." in full or imported & file.facts.imports else ""
    asked = ""
    if name == "create_model" and "timm" in full:
        asked = _asked(call, 0, file)
    elif full.endswith("hub.load"):
        asked = _asked(call, 1, file)
    if not asked and call in file.models:
        # A class of its own around such a network, whose name it is given or has by default.
        own = [text(c.node) for c in file.facts.classes if c.node.name == name]
        around = "".join(own or file.facts.imported_parts(call, 0))
        if _BY_NAME.search(around):
            asked = _asked(call, 0, file) or "".join(_BY_DEFAULT.findall(around)[:1])
    if _KNOWN_MODEL.match(asked):
        return asked
    if full in {"EfficientNet.from_pretrained", "EfficientNet.from_name"}:
        return "EfficientNet"
    of_segmentation = full.startswith(("smp.", "segmentation_models_pytorch."))
    return name if of_segmentation and name in _SEGMENTERS else ""


def _asked(call: ast.Call, index: int, file: File) -> str:
    """Return the name of a network that a call asks for: a string, or the default of an option."""
    given = call.args[index] if len(call.args) > index else keyword(call, "model_name")
    value = getattr(given, "value", None)
    if isinstance(value, str) or given is None:
        return value if isinstance(value, str) else ""
    key = text(given.slice).strip("'") if isinstance(given, ast.Subscript) else last_part(given)
    named = rf"\b{re.escape(key)}\b['\"]?(, [^\n)]*default)? ?[:=] ?(str ?= ?)?['\"]([\w.]+)['\"]"
    found = {m[2] for m in re.findall(named, file.facts.source)} if key else set()
    known = all(map(_KNOWN_MODEL.match, found))
    return min(found) if found and known else ""
