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
# Not a closure, but the rate of `optimizer.step(lr)`.
_RATE = re.compile(r"(^|_)lr($|_)|rate|epoch|^[\d.]+$")
# Functions by the name of what they do to the gradients, to DDP's reduction and to BatchNorm.
_RESCALES = re.compile(r"(re)?scale_grad\w*|multiply_grads|_foreach_(mul|div)_|average_gradients")
HOLDS_SYNC = re.compile(
    r"no_sync|require_backward_grad_sync|no_backward_sync|disable_allreduce"
    r"|set_requires_gradient_sync|ddp_sync"
)
_FREEZES = re.compile(
    r"FrozenBatchNorm\w*|\w*(freeze|fix|frozen)_?(bn|batch_?norm)\w*|\w*bn_?eval", re.I
)
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
    if name.strip("_") == "optimizer_step":
        return Effect("step", positional(call, 0), detail="xla")
    if name in {"mul_", "div_"} and is_gradient(owner):
        return Effect("rescale", owner, positional(call, 0))
    if name == "zero_" and is_gradient(owner):
        return Effect("clear", owner)
    if _RESCALES.fullmatch(name):
        return Effect("rescale", owner)
    if HOLDS_SYNC.fullmatch(name):
        return Effect("hold_sync", owner)
    if any(_FREEZES.fullmatch(word) for word in (name, *map(last_part, call.args))):
        return Effect("freeze", owner)
    native = _native_scaler(call)
    if native is not None or owner is None:
        return native
    if name == "backward":
        return _backward(call, owner, makers)
    if name == "manual_backward":
        return Effect("backward", owner, positional(call, 0), "lightning")
    if name in _SIMPLE:
        return Effect(_SIMPLE[name], owner, positional(call, 0))
    if name in {"step", "step_and_update_lr"} or (name == "optimize" and call.args):
        return _step(call, owner, makers)
    return None


def is_gradient(target: ast.AST | None) -> bool:
    """True for `p.grad` and `p.grad.data`."""
    return isinstance(target, ast.Attribute) and text(target).removesuffix(".data").endswith(
        ".grad"
    )


def _native_scaler(call: ast.Call) -> Effect | None:
    # `loss_scaler(loss, optimizer, ..., update_grad=cond)`: a backward, and the step if cond.
    is_scaler = last_part(call.func).lower().endswith(("loss_scaler", "nativescaler"))
    if not is_scaler or len(call.args) < 2:
        return None
    return Effect("native", call.func, positional(call, 0))


def only_measures(call: ast.Call) -> bool:
    """True if a clipping call has no limit, so that it returns the norm and changes nothing."""
    limit = positional(call, 1) or keyword(call, "max_norm")
    if isinstance(limit, ast.Call) and dotted(limit.func) == "float":
        return True
    return limit is not None and (dotted(limit) or "").endswith("inf")


def _backward(call: ast.Call, owner: ast.expr, makers: Makers) -> Effect | None:
    made = {maker.rpartition(".")[2] for maker, _ in makers(owner)}
    if keyword(call, "units") is not None or made & _OURS:
        return None  # wholebatch's own: it weighs by units and closes the window itself.
    first = positional(call, 0) or keyword(call, "loss")
    owner_name = last_part(owner).lower()
    kind = role(owner, makers)
    if dotted(owner) == "torch.autograd":
        return Effect("backward", None, first, "tensor")
    if "accelerator" in owner_name or "Accelerator" in made:
        return Effect("backward", owner, first, "accelerate")
    if "fabric" in owner_name or "Fabric" in made:
        return Effect("backward", owner, first, "fabric")
    if first is None or "loss" in owner_name:
        return Effect("backward", None, owner, "tensor")
    if kind == "optimizer" or owner_name in {"booster", "amp", "mp_trainer"}:
        return Effect("backward", owner, first, "wrapper")
    return Effect("backward", owner, first, "engine")


def _step(call: ast.Call, owner: ast.expr, makers: Makers) -> Effect | None:
    kind = role(owner, makers)
    if kind == "scheduler":
        return Effect("schedule", owner)
    if kind == "scaler":
        return Effect("step", positional(call, 0), detail="scaler")
    if kind == "optimizer":
        closure = positional(call, 0) or keyword(call, "closure")
        calls = closure is not None and not _RATE.search(text(closure))
        return Effect("step", owner, detail="closure" if calls else "")
    # A wrapper that is handed the optimizer: `amp.step(model, optimizer)`.
    held = next((a for a in call.args if role(a, makers) == "optimizer"), None)
    if held is not None:
        return Effect("step", held, detail="wrapper")
    return None
