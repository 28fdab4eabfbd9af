"""The values of the model: definitions, loops, conditions and events; the kinds of calls.

A function is walked once and becomes a flat list of events. Each event knows its path: the loops,
conditions and `with` blocks around it, outermost first. Every question of a rule ("is this clip
under the boundary?") is a question about such paths.

A method called `step` may belong to an optimizer, a schedule, a scaler, an engine or a game. The
constructor of the receiver decides. Its name decides only if the constructor is not in the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from .expressions import dotted, keyword, last_part, positional, text


@dataclass(frozen=True, eq=False)
class Definition:
    """One assignment: the expression, its environment, and the loops around it."""

    expr: ast.expr
    env: Env
    loops: tuple[Loop, ...]
    node: ast.AST | None = None


class Env(dict[str, tuple[Definition, ...]]):
    """The possible definitions of each name at one place."""

    __slots__ = ("_copy", "changed")

    def __init__(self, names: Mapping[str, tuple[Definition, ...]] = MappingProxyType({})) -> None:
        super().__init__(names)
        self._copy: Env | None = None
        self.changed: set[str] = set()  # Since this state was copied from another.

    def bind(self, name: str, defs: tuple[Definition, ...]) -> None:
        """Set the definitions of a name. All changes must go through this method."""
        self[name] = defs
        self.changed.add(name)
        self._copy = None

    def drop(self, prefix: str) -> None:
        """Forget the slots of an object that was replaced: `state['loss']['total']`."""
        for name in [n for n in self if n.startswith(prefix)]:
            self.bind(name, ())

    def frozen(self) -> Env:
        """Return a copy of the present state. The copy is shared until the next change."""
        if self._copy is None:
            self._copy = Env(self)
        return self._copy


@dataclass(eq=False)
class Loop:
    """A loop, or the body of a step function that a framework calls once per micro-batch."""

    node: ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
    entry: Env
    parents: tuple[Loop, ...]
    target: ast.expr | None = None
    iterable: ast.expr | None = None
    exit: Env = field(default_factory=lambda: Env())
    carried: set[str] = field(default_factory=set)

    @property
    def virtual(self) -> bool:
        """True if the loop itself is elsewhere and only its body is in this file."""
        return isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef))


@dataclass(frozen=True, eq=False)
class Guard:
    """A condition on the path; `origin` is "if", "skip" (by `continue`), "break" or "except"."""

    expr: ast.expr
    env: Env
    positive: bool
    origin: str = "if"

    @cached_property
    def key(self) -> tuple[str, bool]:
        """Return the condition as text, and its sign: equal for two spellings of one setting."""
        return text(self.expr), self.positive

    @cached_property
    def claims(self) -> set[tuple[str, bool]]:
        """Return what holds on this side: of `a and not b` both parts, each with its sign."""
        claims: set[tuple[str, bool]] = set()
        todo = [(self.expr, self.positive)]
        while todo:
            expr, positive = todo.pop()
            if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not):
                todo.append((expr.operand, not positive))
                continue
            claims.add((text(expr), positive))
            if isinstance(expr, ast.BoolOp) and isinstance(expr.op, ast.And) is positive:
                todo += [(value, positive) for value in expr.values]
        return claims


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` item on the path."""

    expr: ast.expr
    env: Env
    node: ast.With | ast.AsyncWith

    @cached_property
    def made(self) -> str:
        """Return the text of the item, and of what its name stands for."""
        name = dotted(getattr(self.expr, "func", self.expr)) or ""
        return "\n".join(text(e) for e in (self.expr, *(d.expr for d in self.env.get(name, ()))))


PathItem = Loop | Guard | Context


@dataclass(frozen=True, eq=False)
class Symbol:
    """A name whose value changes from one iteration to the next, written `name@7`."""

    name: str
    loops: tuple[Loop, ...]
    kind: str  # "carried": changed by the body; "target": the loop's own; "opaque": a result
    loop: Loop | None = None
    init: tuple[Definition, ...] = ()


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one call."""

    kind: str
    receiver: ast.expr | None = None
    argument: ast.expr | None = None
    detail: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Event(Effect):
    """An effect, with its place in the file and its conditions."""

    node: ast.AST
    stmt: ast.stmt
    path: tuple[PathItem, ...]
    env: Env
    order: int
    root: int  # The function whose walk came here: events of two walks are unrelated.
    receiver_text: str = ""

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops around the event, outermost first."""
        return tuple(item for item in self.path if isinstance(item, Loop))

    @property
    def line(self) -> int:
        """Return the source line, counted from 1."""
        return int(getattr(self.node, "lineno", 1))

    def inside(self, loop: Loop) -> tuple[PathItem, ...]:
        """Return the path between a loop and the event."""
        return self.path[self.path.index(loop) + 1 :] if loop in self.path else ()

    def excludes(self, other: Event) -> bool:
        """True if the two are on opposite branches of one condition."""
        mine = {c for g in self.path if isinstance(g, Guard) for c in g.claims}
        theirs = [c for g in other.path if isinstance(g, Guard) for c in g.claims]
        return any((spelled, not positive) in mine for spelled, positive in theirs)

    def conditions(self, loop: Loop) -> set[tuple[str, bool]]:
        """Return the conditions between a loop and the event, as text."""
        return {guard.key for guard in self.guards(loop)}

    def guards(self, loop: Loop) -> list[Guard]:
        """Return the conditions between a loop and the event."""
        return [item for item in self.inside(loop) if isinstance(item, Guard)]

    def contexts(self, loop: Loop) -> list[Context]:
        """Return the `with` items between a loop and the event."""
        return [item for item in self.inside(loop) if isinstance(item, Context)]


# Names of objects, and of what makes them: `lr_sched`, `OneCycleLR`, `get_cosine_schedule`.
_SCHEDULER = re.compile(
    r"(?i:sched|warm_?up|anneal|lr_policy|lr_decay)|\blrs$|LR$|ReduceLROnPlateau"
)
_OPTIMIZER = re.compile(
    r"(?i:optim)|(^|_)(?i:opts?)($|_|\d)|^opt[A-Z_]|^sgd$|^adam"
    r"|^(Fused|Bert|CPU)?(Adam|SGD|Lion|LAMB|Lamb)|Adafactor|RMSprop|Adagrad|LBFGS"
)
_SCALER = re.compile(r"scaler(?!\w*(meter|metric|avg|stat))", re.I)
_ENGINE = re.compile(r"(^|_)engine$|^ds_model$", re.I)
MODEL_NAME = re.compile(
    r"^(?!save|load|get|build|create|make|valid|eval|test|init|export|unwrap|prepare|set|move|update|log)"
    r"(\w*model|\w*_module|net|network|\w*_net|unet\w*|transformer|module|encoder|decoder|dit"
    r"|backbone|net[A-Z]\w*|gpt|vae|controlnet|\w*ranker|generator|discriminator|policy|actor|critic)$",
    re.I,
)
# Not a closure, but the rate of `optimizer.step(lr)`.
_RATE = re.compile(r"(^|_)lr($|_)|rate|epoch|^[\d.]+$")
_SIMPLE = {"zero_grad": "zero", "unscale_": "unscale"}
_OURS = {"AccelerateAccumulator", "FabricAccumulator", "Accumulator", "WholeBatch"}
_WRAPPERS = {"DistributedDataParallel", "DDP", "FSDP", "DataParallel"}


def holds_sync(context: Context) -> bool:
    """True if a `with` item is (or was assigned from) a `no_sync()`."""
    return "no_sync" in context.made or "no_backward_sync" in context.made


def constructor(definition: Definition) -> tuple[str, int | None]:
    """Return a definition's constructor ("" if not a call), and its index in a returned tuple."""
    expr: ast.expr = definition.expr
    index: int | None = None
    if isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Constant):
        index = expr.slice.value if isinstance(expr.slice.value, int) else None
        expr = expr.value
    if isinstance(expr, ast.Call):
        return dotted(expr.func) or last_part(expr.func), index
    return "", None


def constructors(receiver: ast.expr, env: Env) -> list[tuple[str, int | None]]:
    """Return every possible constructor of a receiver, following plain aliases."""
    found: list[tuple[str, int | None]] = []
    todo: list[tuple[ast.expr, Env]] = [(receiver, env)]
    for _ in range(12):
        if not todo:
            break
        expr, where = todo.pop()
        name = dotted(expr)
        for definition in where.get(name or "", ()):
            made = constructor(definition)
            if made[0]:
                found.append(made)
            elif dotted(definition.expr) not in (None, name):
                todo.append((definition.expr, definition.env))
    return found


def role(receiver: ast.expr, env: Env) -> str:
    """Return the role of a receiver: optimizer, scheduler, scaler, engine or ""."""
    for made, index in constructors(receiver, env):
        if made.endswith("deepspeed.initialize") or made == "deepspeed.initialize":
            return ("engine", "optimizer", "", "scheduler")[index] if index in (0, 1, 3) else ""
        if made.endswith("GradScaler"):
            return "scaler"
        if index is not None:
            continue  # One of several values that a helper returned: its own name decides.
        if _SCHEDULER.search(made) and "Optim" not in made.rpartition(".")[2]:
            return "scheduler"
        if "optim." in made or _OPTIMIZER.search(made.rpartition(".")[2]):
            return "optimizer"
    inner = receiver
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    if isinstance(inner, ast.Call):
        inner = inner.func
    name = last_part(inner)
    for kind, pattern in (
        ("scheduler", _SCHEDULER),
        ("scaler", _SCALER),
        ("optimizer", _OPTIMIZER),
        ("engine", _ENGINE),
    ):
        if pattern.search(name):
            return kind
    return ""


def classify(call: ast.Call, env: Env) -> Effect | None:
    """Return the effect of a call on a window, or None if it has none that we know."""
    func = call.func
    name = last_part(func)
    if name.removeprefix("dispatch_").startswith("clip_grad"):
        owner = func.value if isinstance(func, ast.Attribute) else None
        return None if only_measures(call) else Effect("clip", owner, detail=name)
    if name.strip("_") == "optimizer_step":
        return Effect("step", positional(call, 0), detail="xla")
    if name.endswith("_unscale_"):  # torch's own, by hand.
        return Effect("unscale", positional(call, 0))
    if isinstance(func, ast.Name):
        return _plain_call(call, func, env)
    if not isinstance(func, ast.Attribute):
        return None
    owner = func.value
    if name == "backward":
        return _backward(call, owner, env)
    if name == "manual_backward":
        return Effect("backward", owner, positional(call, 0), "lightning")
    if name == "training_step" and dotted(owner) == "self":
        return Effect("backward", owner, None, "trainer")  # transformers' own: it divides.
    if name in _SIMPLE:
        return Effect(_SIMPLE[name], owner, positional(call, 0))
    if name in {"step", "step_and_update_lr"} or (name == "optimize" and call.args):
        return _step(call, owner, env)
    if name == "update" and role(owner, env) == "scaler":
        return Effect("scaler_update", owner)
    if MODEL_NAME.match(name):
        return Effect("forward", func)
    return _native_scaler(call, func)


def _plain_call(call: ast.Call, func: ast.Name, env: Env) -> Effect | None:
    native = _native_scaler(call, func)
    if native is not None:
        return native
    if MODEL_NAME.match(func.id) or any(
        made.rpartition(".")[2] in _WRAPPERS for made, _ in constructors(func, env)
    ):
        return Effect("forward", func)
    return None


def _native_scaler(call: ast.Call, func: ast.expr) -> Effect | None:
    # `loss_scaler(loss, optimizer, ..., update_grad=cond)`: a backward, and the step if cond.
    is_scaler = last_part(func).lower().endswith(("loss_scaler", "nativescaler"))
    if not is_scaler or len(call.args) < 2:
        return None
    return Effect("native", func, positional(call, 0), "update_grad")


def only_measures(call: ast.Call) -> bool:
    """True if a clipping call has no limit, so that it returns the norm and changes nothing."""
    limit = positional(call, 1) or keyword(call, "max_norm")
    if isinstance(limit, ast.Call) and dotted(limit.func) == "float":
        return True
    return limit is not None and (dotted(limit) or "").endswith("inf")


def _backward(call: ast.Call, owner: ast.expr, env: Env) -> Effect | None:
    if keyword(call, "units") is not None or any(
        made.rpartition(".")[2] in _OURS for made, _ in constructors(owner, env)
    ):
        return None  # wholebatch's own: it weighs by units and closes the window itself.
    first = positional(call, 0) or keyword(call, "loss")
    owner_name = last_part(owner).lower()
    if dotted(owner) == "torch.autograd":
        return Effect("backward", None, first, "tensor")
    if "accelerator" in owner_name or any(
        made.endswith("Accelerator") for made, _ in constructors(owner, env)
    ):
        return Effect("backward", owner, first, "accelerate")
    if "fabric" in owner_name:
        return Effect("backward", owner, first, "fabric")
    if first is None or "loss" in owner_name:
        return Effect("backward", None, owner, "tensor")
    if role(owner, env) == "optimizer" or owner_name in {"booster", "amp", "mp_trainer"}:
        return Effect("backward", owner, first, "wrapper")
    if role(owner, env) == "engine":
        return Effect("backward", owner, first, "deepspeed")
    return Effect("backward", owner, first, "engine")


def _step(call: ast.Call, owner: ast.expr, env: Env) -> Effect | None:
    kind = role(owner, env)
    if kind == "scheduler":
        return Effect("sched", owner)
    if kind == "scaler":
        return Effect("step", positional(call, 0), detail="scaler")
    if kind == "optimizer":
        closure = positional(call, 0) or keyword(call, "closure")
        calls = closure is not None and not _RATE.search(text(closure))
        return Effect("step", owner, detail="closure" if calls else "")
    # A wrapper that is handed the optimizer: `amp.step(model, optimizer)`.
    held = next((a for a in call.args if role(a, env) == "optimizer"), None)
    if held is not None:
        return Effect("step", held, detail="wrapper")
    if kind == "engine" or (not call.args and MODEL_NAME.match(last_part(owner))):
        return Effect("engine_step", owner)
    return None
