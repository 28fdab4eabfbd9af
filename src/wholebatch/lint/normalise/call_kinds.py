"""The kinds of calls: which effect on training a call has.

A method called `step` may belong to an optimizer, a schedule, a scaler or a game. The
constructor of the receiver decides. Its name decides only if the constructor is not in the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from .events import Effect
from .syntax import dotted, keyword, last_part, positional, text

Makers = Callable[[ast.AST | None], list[tuple[str, int | None]]]
"""Returns the constructors of an expression, each with its index in a returned tuple."""

# Names of objects, and of what makes them: `lr_sched`, `OneCycleLR`, `get_cosine_schedule`.
_SCHEDULER = re.compile(
    r"(?i:sched|warm_?up|anneal|lr_policy|lr_decay)|\blrs$|LR$|ReduceLROnPlateau"
)
_OPTIMIZER = re.compile(
    r"(?i:optim)|(^|_)(?i:opts?)($|_|\d)|^opt[A-Z_]|^sgd$|^adam"
    r"|^(Fused|Bert|CPU)?(Adam|SGD|Lion|LAMB|Lamb)|Adafactor|RMSprop|Adagrad|LBFGS"
)
_SCALER = re.compile(r"scaler(?!\w*(meter|metric|avg|stat))", re.I)
_ROLES = (("scheduler", _SCHEDULER), ("scaler", _SCALER), ("optimizer", _OPTIMIZER))
# Functions that rescale gradients, by their names.
_RESCALES = re.compile(r"(re)?scale_grad\w*|multiply_grads|_foreach_(mul|div)_|average_gradients")
_SIMPLE = {"zero_grad": "clear", "unscale_": "unscale"}
_OURS = {"AccelerateAccumulator", "FabricAccumulator", "Accumulator", "WholeBatch"}


def role(receiver: ast.expr, makers: Makers) -> str:
    """Return the role of a receiver: optimizer, scheduler, scaler or ""."""
    for maker, index in makers(receiver):
        name = maker.rpartition(".")[2]
        if name.endswith("GradScaler"):
            return "scaler"
        if index is not None:
            continue  # One of several values that a helper returned: its own name decides.
        if _SCHEDULER.search(maker) and "Optim" not in name:
            return "scheduler"
        if "optim." in maker or _OPTIMIZER.search(name):
            return "optimizer"
    inner = receiver
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    name = last_part(inner.func if isinstance(inner, ast.Call) else inner)
    return next((kind for kind, pattern in _ROLES if pattern.search(name)), "")


def effect_of(call: ast.Call, makers: Makers) -> Effect | None:
    """Return the effect of a call in normal form, or None if it has none that we know."""
    func, name = call.func, last_part(call.func)
    owner = func.value if isinstance(func, ast.Attribute) else None
    if name.removeprefix("dispatch_").startswith("clip_grad"):
        return None if only_measures(call) else Effect("clip", owner, detail=name)
    if name in {"zero_", "mul_", "div_"} and is_gradient(owner):
        return Effect("clear" if name == "zero_" else "rescale", argument=positional(call, 0))
    if _RESCALES.fullmatch(name):
        return Effect("rescale")
    if owner is None:
        return None
    if name == "backward":
        return _backward(call, owner, makers)
    if name == "manual_backward":
        return Effect("backward", owner, positional(call, 0), "lightning")
    if name in _SIMPLE:
        return Effect(_SIMPLE[name], owner, positional(call, 0))
    return _step(call, owner, makers) if name == "step" else None


def is_gradient(target: ast.AST | None) -> bool:
    """True for `p.grad` and `p.grad.data`."""
    return isinstance(target, ast.Attribute) and text(target).removesuffix(".data").endswith(
        ".grad"
    )


def only_measures(call: ast.Call) -> bool:
    """True if a clipping call has no limit, so that it returns the norm and changes nothing."""
    limit = positional(call, 1) or keyword(call, "max_norm")
    if isinstance(limit, ast.Call) and dotted(limit.func) == "float":
        return True
    return limit is not None and (dotted(limit) or "").endswith("inf")


def _backward(call: ast.Call, owner: ast.expr, makers: Makers) -> Effect | None:
    types = {maker.rpartition(".")[2] for maker, _ in makers(owner)}
    if keyword(call, "units") is not None or types & _OURS:
        return None  # wholebatch's own: it weighs by units and closes the window itself.
    first = positional(call, 0) or keyword(call, "loss")
    owner_name = last_part(owner).lower()
    if dotted(owner) == "torch.autograd":
        return Effect("backward", None, first, "tensor")
    if "accelerator" in owner_name or "Accelerator" in types:
        return Effect("backward", owner, first, "accelerate")
    if "fabric" in owner_name or "Fabric" in types:
        return Effect("backward", owner, first, "fabric")
    if first is None or "loss" in owner_name:
        return Effect("backward", None, owner, "tensor")
    return Effect("backward", owner, first, "engine")


def _step(call: ast.Call, owner: ast.expr, makers: Makers) -> Effect | None:
    kind = role(owner, makers)
    if kind == "scheduler":
        return Effect("schedule", owner)
    if kind == "scaler":
        return Effect("step", positional(call, 0), detail="scaler")
    if kind == "optimizer":
        closure = isinstance(
            positional(call, 0) or keyword(call, "closure"), (ast.Name, ast.Lambda)
        )
        return Effect("step", owner, detail="closure" if closure else "")
    return None
