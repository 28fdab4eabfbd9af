"""The loss that is logged is the divided one, or that of the last micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from ..model import Event, File, LoopWindow
from ..model.events import Def, Env, Loop
from ..model.expressions import dotted, is_binary, is_call, last_part, number, text, walk
from ..model.file_facts import flat_env
from ..model.loss_origin import Chain, counted, trace
from ..model.name_resolution import strip_casts
from .rule_base import Report, rule

_SINK = re.compile(
    r"(\w+_)?print\w*|log|log(_|kv)\w*|info|debug|warning|add_scalars?|set_postfix\w*|report\w*"
    r"|set_description\w*|Logger|write|scalar_summary|(update_|write_)?progress_?bar|track|\w+_log|linePlot"
)
_KEEPERS = re.compile(r"loss|meter|metric|avg|average|tracker|history|record|stat|^logs?$", re.I)
_WRITER = re.compile(
    r"(^|[._])(tb|\w*writer|\w*logger|wandb|tracker|tensorboard|mlflow|recorder|swanlab|board)$",
    re.I,
)
_MATH = re.compile(r"log_(softmax|prob|sigmoid|every|likelihood|sum)\w*|\w*softmax\w*")
_BAR = re.compile(r"p_?bar|prog(ress)?_?bar|progress", re.I)
_LOSS = re.compile(r"loss|nll|ppl|perplex|err|(?<![a-z])(ce|mse|kl)(?![a-z])", re.I)
_LENGTH = re.compile(r"len\([\w.]*(loader|iterator|batches|dl|ld)\)")
_CHECK = re.compile(r"is (not )?None|isinstance\(|isfinite|isnan|isinf")
_NO_NUMBER = re.compile(r"isnan|isinf|not (math|torch|np)\.isfinite")
_LAST = (
    "reported loss is that of the last micro-batch, not of the window: log the mean over its "
    "micro-batches"
)


@rule("reported loss")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report of each kind per window."""
    shown: set[int] = set()
    windows = file.accumulating
    known = {id(window): _bases(window) for window in windows}
    for at, window in enumerate(windows):
        # One of two loops (`if amp: ... else: ...`) computed the loss that is logged after both.
        beside = [
            known[id(other)]
            for other in windows[max(0, at - 2) : at + 3]
            if other.shape == window.shape and other.loop.parents == window.loop.parents
        ]
        bases = set().union(*beside) if known[id(window)] else set()
        found = [*_logged(window, bases, file), *_averaged(window, bases, file)]
        for report in found or _kept_at_boundary(window, bases):
            if id(report.node) not in shown:
                shown.add(id(report.node))
                yield report


def _bases(window: LoopWindow) -> set[int]:
    chains = [trace(e.argument, e.env, window.resolver) for e in window.of("backward")]
    bases = [(c.base, c.base_env) for ways in chains for c in ways if c.base is not None]
    # A setting in the loss, such as the weight of a term, is no loss; `model.last_loss` is one.
    return {
        id(base)
        for base, env in bases
        if dotted(base) is None
        or last_part(base).endswith("loss")
        or window.resolver.symbols_in(window.resolver.resolve(base, env))
    }


def _loss_chains(
    expr: ast.expr | None, env: Env, window: LoopWindow, bases: set[int]
) -> list[Chain]:
    """Return the derivations of a value if all of them start at a loss of the window, else [].

    After an inner loop, the value before may be mixed in: a moving average.
    """
    shown = "" if expr is None else text(expr)
    named = {*re.findall(r"\w+", " ".join(map(_argument, window.backwards)))}
    if "(" in shown and not _LOSS.search(shown) and named.isdisjoint(re.findall(r"\w+", shown)):
        return []  # Another quantity of the same forward.
    known = frozenset(bases if _LOSS.search(shown) else ())
    chains = trace(expr, env, window.resolver, known)
    made = {id(chain.base_call) for _, chain in window.chains} if "loss" in shown else set()
    # A part of the loss, out of the same call.
    parts = {id(c.base) for c in chains if c.base_call is not None and id(c.base_call) in made}
    others = [c for c in chains if id(c.base) not in bases | parts]
    smoothed = window.shape == "nested" and all(
        c.weighted and not isinstance(c.base, ast.Call) for c in others
    )
    if not others or smoothed:
        return [c for c in chains if c not in others]
    # The very value of the backward, whatever it is made of.
    name = re.sub(r"\.\w+\(\)|^float\(|\)$", "", shown)
    same = [
        e for e in window.backwards if _argument(e) == name and e.env.get(name) == env.get(name)
    ]
    return window.ways(same[0]) if same else []


def _argument(event: Event) -> str:
    """Return the `loss` of `scaler.scale(loss).backward()`, or ""."""
    scaled = is_call(event.argument, "scale") and event.argument.args
    return text(scaled[0] if scaled else event.argument) if event.argument is not None else ""


def _logged(window: LoopWindow, bases: set[int], file: File) -> Iterator[Report]:
    reported: set[str] = set()
    for event, shown in _shown(window) if bases else ():
        values = [
            (value, env, _loss_chains(value, env, window, bases))
            for value, env in _values(shown, event.env, window.resolver.returns)
        ]
        # Beside the loss itself, the divided one is shown for what it is.
        plain = [ways for *_, ways in values if all(_scale(c, window) == 0 for c in ways)]
        whole = {id(c.base) for ways in plain for c in ways}
        for value, env, chains in values:
            words = _wrong(chains, event, window)
            beside = words != _LAST and any(id(c.base) in whole for c in chains)
            if words and not beside and words not in reported:
                reported.add(words)
                yield Report(_where(event, value, env, window, file), words)
                break


def _wrong(chains: list[Chain], event: Event, window: LoopWindow) -> str:
    """Return what is wrong with a logged loss, or ""."""
    name = window.count_name
    if any((_scale(c, window) or 0) < 0 for c in chains):
        return (
            f"reported loss was divided by `{name}`: it is that many times too small; log the loss "
            "before the division, averaged over the window"
        )
    # A method of another file may have divided it.
    calls = [c.base_call for c in chains if c.base_call is not None]
    known = bool(calls) and not any(re.match(r"self\.\w+\(", text(call)) for call in calls)
    if known and all(
        not c.divisors and any(window.is_count(f) for f in c.factors) for c in chains or [Chain()]
    ):
        return (
            f"reported loss is multiplied by `{name}`, but was not divided by it: it is that many "
            "times too large; log the loss as it is"
        )
    inner = window.loop not in event.path if _is_inner(window) else None
    is_last = window.when(event) == "boundary" if inner is None else inner
    return _LAST if chains and is_last else ""


def _shown(window: LoopWindow) -> Iterator[tuple[Event, list[ast.expr]]]:
    """Yield what is logged, and the numbers that the function returns to its caller."""
    after = [e for e in window.after if e.loops == window.loop.parents and _is_inner(window)]
    for event in (*window.events, *after):
        # A warning about a loss that is no number.
        if any(_NO_NUMBER.search(g.key[0]) and g.positive for g in event.guards(window.loop)):
            continue
        # An inner loop (an evaluation, say) has losses of its own, unless it shows some entries.
        inner = event.loops[-1:] if event.loops[-1:] != (window.loop,) else ()
        entries = _entries(inner[0]) if inner else None
        loops = event.loops if entries is None else event.loops[:-1]
        if loops[-1:] not in {(window.loop,), window.loop.parents[-1:]}:
            continue
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call):
            handed = [*call.args, *(k.value for k in call.keywords)]
            handed = handed if entries is None else [entries]
            if _is_sink(call):
                yield event, handed if not _is_summed(call, window) else []
            elif text(event.stmt) == text(call) and "accum" not in last_part(call.func):
                # Whatever takes a number of the loss and gives nothing back keeps or shows it.
                yield event, [v for h in handed for v in _numbers(h, event.env)]
        elif event.kind == "assign" and isinstance(event.receiver, ast.Subscript):
            if event.argument is not None and "loss" in text(event.receiver.slice):
                yield event, _numbers(event.argument, event.env)
        elif event.kind == "return" and event.argument is not None:
            yield event, _numbers(event.argument, event.env)


def _entries(loop: Loop) -> ast.expr | None:
    """Return the dictionary of `for k, v in metrics.items()`, or None for another loop."""
    over = loop.iterable
    if not is_call(over, "items", "values") or not isinstance(over.func, ast.Attribute):
        return None
    return over.func.value


def _is_summed(call: ast.Call, window: LoopWindow) -> bool:
    """True for `kept.append(x)` where `sum(kept)` is used: the sum of a window's shares."""
    kept = re.escape(text(call.func.value)) if isinstance(call.func, ast.Attribute) else ""
    pattern = rf"\bsum\({kept}\)(?! */)|\({kept}\)\.sum\(\)(?! */)"
    return last_part(call.func) == "append" and bool(re.search(pattern, window.facts.source))


def _numbers(expr: ast.expr, env: Env) -> list[ast.expr]:
    """Return the plain numbers in a returned value: `loss.item()`, not the loss itself."""
    if isinstance(expr, ast.Call) and last_part(expr.func)[:1].isupper():
        expr = ast.Tuple([*expr.args, *(k.value for k in expr.keywords)])  # A named tuple.
    values = [value for value, _ in _values([expr], env)]
    return [v for v in values if any(is_call(n, "item", "float", "tolist") for n in walk(v))]


def _where(event: Event, value: ast.expr, env: Env, window: LoopWindow, file: File) -> ast.AST:
    """Return the call, or the statement that computed its value if a helper makes the call."""
    function = _function_of(window, file)
    first = getattr(function, "lineno", 0)
    lines = range(first, (getattr(function, "end_lineno", None) or event.line) + 1)
    made = [d.node for d in env.get(text(value), ()) if d.node is not None]
    places = [n for n in (event.node, value, *made) if getattr(n, "lineno", -1) in lines]
    return places[0] if places else event.node


def _is_sink(call: ast.Call) -> bool:
    name = last_part(call.func)
    owner = text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if "accum" in name:
        return False  # A helper that adds up.
    if not owner and _BAR.fullmatch(name):
        return len(call.args) > 1  # A callable progress bar: `pbar(step, {"loss": ...})`.
    if _SINK.fullmatch(name):
        return not _MATH.fullmatch(name) and not re.fullmatch(r"math|torch|np|numpy|F|jnp", owner)
    if name in {"append", "update", "add"} and owner:
        return bool(_KEEPERS.search(owner)) and bool(call.args)
    return bool(_WRITER.search(owner))


def _values(
    shown: list[ast.expr], env: Env, returns: Mapping[int, list[Def]] | None = None
) -> Iterator[tuple[ast.expr, Env]]:
    """Yield the values that are shown: through f-strings, dictionaries, `%` and helpers."""
    todo = [(a, env, 0) for a in shown]
    while todo:
        expr, where, depth = todo.pop(0)
        name = expr.id if isinstance(expr, ast.Name) else ""
        made = where.get(name, ())
        held = [d for d in made if isinstance(d.expr, (ast.Dict, ast.JoinedStr))]
        held += [d for d in made if is_call(d.expr, "dict")]
        slots = [d for n, d in where.items() if name and n.startswith(f"{name}[")]
        if held and len(held) == len(made):
            inner = [(d.expr, d.env) for d in (*held, *(d[0] for d in slots if len(d) == 1))]
        else:
            inner = [(part, where) for part in _values_inside(expr)]
            given = [d for m in made for d in (returns or {}).get(id(m.expr), ())]
            held_there = len(given) == 1 and (
                isinstance(given[0].expr, (ast.Dict, ast.Name)) or is_call(given[0].expr, "dict")
            )
            if len(made) == 1 and held_there:  # `status = train_micro_batch(x)`
                inner = [(given[0].expr, given[0].env)]
        if not inner:
            yield expr, where
            inner = [(d.expr, d.env) for defs in slots for d in defs]
            # A helper's parameter: what it was handed.
            inner += [(d.expr, d.env) for d in made[:1] if d.node is d.expr]
        todo += [(*part, depth + 1) for part in inner if depth < 5]


def _values_inside(expr: ast.expr) -> list[ast.expr]:
    if isinstance(expr, ast.JoinedStr):
        return [v.value for v in expr.values if isinstance(v, ast.FormattedValue)]
    if isinstance(expr, ast.Dict):
        return expr.values
    if isinstance(expr, (ast.Tuple, ast.List)):
        return expr.elts
    if isinstance(expr, ast.Starred):
        return [expr.value]
    if is_binary(expr, ast.Mod):
        return [expr.right]
    if is_call(expr, "format", "dict"):
        return [*expr.args, *(k.value for k in expr.keywords)]
    return expr.args[:1] if is_call(expr, "float", "round", "str") else []


def _is_inner(window: LoopWindow) -> bool:
    """True if the loop runs over the micro-batches of one batch, so that it ends with a window."""
    sliced = is_call(window.loop.iterable, "range") and len(window.loop.iterable.args) == 3
    inside = window.shape == "deepspeed" and sliced and bool(window.loop.parents)
    iterable = window.loop.iterable if window.shape == "accelerate" else None
    counted = is_call(iterable, "range") and window.is_count(text(iterable.args[-1]))
    return window.shape == "nested" or inside or counted


def _sums(
    window: LoopWindow, when: str, bases: set[int]
) -> Iterator[tuple[Event, str, list[Chain]]]:
    """Yield `total += loss.item()`, with the name and the derivations of the loss."""
    for event in window.of("augment", "assign") if bases else ():
        name = None if event.receiver is None else dotted(event.receiver)
        added = event.argument
        if event.kind == "assign":  # `total = total + loss`
            if not is_binary(added, ast.Add) or text(added.left) != name:
                continue
            added = added.right
        # An evaluation has losses of its own.
        if name is None or event.loops[-1] is not window.loop:
            continue
        if (_always(event, window) if when == "always" else window.when(event)) != when:
            continue
        yield event, name, _loss_chains(added, event.env, window, bases)


def _always(event: Event, window: LoopWindow) -> str:
    """Return how often an event happens; a check of the loss (`is not None`) is no condition."""
    checks = (_CHECK.search(text(g.expr)) for g in event.guards(window.loop) if g.origin == "if")
    when = window.when(event)
    return "always" if when == "sometimes" and all(checks) else when


def _kept_at_boundary(window: LoopWindow, bases: set[int]) -> Iterator[Report]:
    """Yield `running_loss += loss.item()` once per window: a mean over one micro-batch of each."""
    for event, name, chains in _sums(window, "boundary", bases):
        same = [e for e in window.of("augment") if e.receiver and dotted(e.receiver) == name]
        # The other micro-batches may be added on another branch.
        if chains and "loss" in name.lower() and all(window.when(e) == "boundary" for e in same):
            yield Report(event.node, _LAST)
            return


def _averaged(window: LoopWindow, bases: set[int], file: File) -> Iterator[Report]:
    """Yield means of added-up losses that are `K` times too small or too large.

    Count the powers of K: a loss divided by K has -1, a sum over the micro-batches of an
    update +1.
    """
    function = _function_of(window, file)
    for _, name, chains in _sums(window, "always", bases):
        scales = [-1 if _is_share(c, window) else _scale(c, window) for c in chains]
        # Undivided on one way, it is divided wherever the number is above 1.
        least = min((scale for scale in scales if scale is not None), default=None)
        sums = _Means(name, window, function) if least is not None else None
        for node, power, is_mean in sums.found() if sums is not None else ():
            if not (is_mean or _is_begun(name, window)):
                continue
            # The sum of one window has all its micro-batches.
            off = power + (least or 0) + (not is_mean)
            if off == -1 or (off == 1 and None not in scales):
                small = "small" if off < 0 else "large"
                divided = "were divided by" if least else "were not divided by"
                over = "micro-batches" if off < 0 else "updates"
                then = f"divided by the number of {over}" if is_mean else "multiplied by it"
                yield Report(
                    node,
                    f"`{name}` adds up losses that {divided} `{window.count_name}`, and is {then}: "
                    f"it is that many times too {small}; show the mean over the micro-batches of "
                    "the losses before the division",
                )
                return
        whole = _shown_whole(name, window, function) if chains and not any(scales) else None
        if whole is not None and None not in scales:
            yield Report(
                whole,
                f"`{name}` adds up the losses of `{window.count_name}` micro-batches and is shown "
                "as it is: it is that many times too large; divide it by their number",
            )
            return


def _is_begun(name: str, window: LoopWindow, guards: int = 1) -> bool:
    """True if a sum is begun anew by every window; by every log too if more guards are allowed."""
    parents = window.loop.parents
    if window.shape == "nested":
        begun = window.loop.entry.get(name, ())
        return bool(parents and begun) and all(d.loops == parents for d in begun)
    ends = [e for e in window.of("assign") if window.when(e) == "boundary"]
    begun_at = [e for e in ends if text(e.receiver or e.node) == name]
    return any(len(e.guards(window.loop)) <= guards for e in begun_at)


def _shown_whole(name: str, window: LoopWindow, function: ast.AST) -> ast.AST | None:
    """Return where the sum of one window's undivided losses is logged, if nothing divides it."""
    parents, counts = window.loop.parents, window.counts
    scaled = re.compile(rf"(?<![\w.]){re.escape(name)}(\.\w+\(\))? *[*/]")
    if window.shape == "nested":
        divided = any(counts(d) for _, chain in window.chains for d in chain.divisors)
        events = [e for e in window.after if e.loops == parents] if divided else []
    else:
        events = [e for e in window.events if window.when(e) == "boundary"]
    events = events if _is_begun(name, window, 9) else []
    same = rf"((self\.)?accelerator\.(gather|reduce)\()?{re.escape(name)}\)?(\.(mean|item)\(\))*"
    for event in [] if scaled.search(text(function)) else events:
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call) and _is_sink(call):
            shown = [*call.args, *(k.value for k in call.keywords)]
            for value, env in _values(shown, event.env):
                made = env.get(text(value).removesuffix(".item()"), ())
                spelled = [text(value), *(text(d.expr) for d in made)]
                if any(re.fullmatch(same, s) for s in spelled):
                    return call
    return None


def _scale(chain: Chain, window: LoopWindow) -> int | None:
    """Return the power of K in a loss: -1 if it is divided by K, None if by something unknown."""
    times = sum(window.is_count(f) for f in chain.factors)
    counts = sum(window.counts(d) for d in chain.divisors)
    others = [d for d in chain.divisors if not (window.counts(d) or d.unrelated or d.elementwise)]
    # A weight of each element, before the mean, is a part of the loss.
    weighed = any("@" in text(w) for w in chain.weights)
    unknown = weighed or any(number(d.expr) is None for d in others)
    return times - counts if counts or not unknown else None


def _is_share(chain: Chain, window: LoopWindow) -> bool:
    """True for a sum over one micro-batch, divided by the size of the whole batch."""
    whole = [d for d in chain.divisors if not (d.elementwise or d.unrelated or window.counts(d))]
    varies = any(window.resolver.varies(d.expr, window.loop) for d in whole)
    summed = {"sum", "mean"} & chain.reducers == {"sum"}
    return window.shape == "nested" and bool(whole) and summed and not varies


class _Means:
    """The means of a sum over micro-batches that a function computes, with their powers of K."""

    def __init__(self, name: str, window: LoopWindow, function: ast.AST) -> None:
        self.name, self.window = name, window
        self.nodes = [*walk(function)]
        self.env = flat_env(self.nodes)
        self.micro = _micro_counters(window)
        self.updates = {
            text(e.stmt.target)
            for e in (*window.of("augment"), *window.after)
            if isinstance(e.stmt, ast.AugAssign) and text(e.stmt.value) == "1"
            if window.when(e) == ("outside" if window.shape == "nested" else "boundary")
        }
        begun = [
            e.receiver for e in window.before if e.kind == "assign" and window.shape == "nested"
        ]
        if any(text(r) == name for r in begun if r is not None):
            # A sum of one window: its number of micro-batches makes it a mean.
            over = window.loop.iterable
            counts = over.args[-1:] if is_call(over, "range") and len(over.args) < 3 else []
            self.micro |= {window.every_name, *map(text, counts)}
        outer = window.loop.parents[-1:] if window.shape == "nested" else ()
        self.updates |= {text(loop.target) for loop in outer if isinstance(loop.target, ast.Name)}
        # `if n % every == 0: total / every` is a mean over what `n` counts.
        rests = [n for n in self.nodes if is_binary(n, ast.Mod)]
        clocks = [(text(n.left).removesuffix(" + 1"), n.right) for n in rests]
        self.micro |= {
            text(by) for clock, by in clocks if clock in self.micro or is_binary(by, ast.Mult)
        }
        self.updates |= {text(by) for clock, by in clocks if clock in self.updates}

    def found(self) -> list[tuple[ast.AST, int, bool]]:
        """Return the outermost multiples in the order of their lines; True for means."""
        inner = {id(n.left) for n in self.nodes if is_binary(n, ast.Mult, ast.Div)}
        quotients = [
            ast.copy_location(ast.BinOp(n.target, n.op, n.value), n)
            if isinstance(n, ast.AugAssign)
            else n
            for n in self.nodes
            if isinstance(n, (ast.BinOp, ast.AugAssign)) and isinstance(n.op, (ast.Mult, ast.Div))
            if id(n) not in inner
        ]
        powers = [(n, self._power(n)) for n in quotients]
        known = [(n, *p) for n, p in powers if p is not None]
        return sorted(known, key=lambda one: int(getattr(one[0], "lineno", 0)))

    def _power(self, expr: ast.expr) -> tuple[int, bool] | None:
        """Return the power of K of a multiple of the sum, and True if a counter divides it."""
        shown = re.sub(r"(\.item\(\)| - \w+)$", "", text(expr))
        if shown == self.name:
            return 0, False
        if is_call(expr, "float", "round") and expr.args:
            return self._power(expr.args[0])
        if not is_binary(expr, ast.Mult, ast.Div):
            return None
        left = self._power(expr.left)
        sign = 1 if isinstance(expr.op, ast.Mult) else -1
        if left is None:
            return None
        right = strip_casts(expr.right)
        right = right.left if is_binary(right, ast.Add) and number(right.right) else right
        begun = right.left if is_binary(right, ast.Sub) else right  # `steps - steps_before`
        by = {text(right), text(begun), *(text(e) for e, _ in counted(right, self.env))}
        is_mean = sign == -1 and not left[1]
        if is_mean and (by & self.micro or any(map(_LENGTH.fullmatch, by))):
            return left[0], True
        if is_mean and by & self.updates:
            return left[0] + 1, True
        return (left[0] + sign, left[1]) if any(map(self.window.is_count, by)) else None


def _micro_counters(window: LoopWindow) -> set[str]:
    target = window.loop.target
    counted = "enumerate" in text(window.loop.iterable or ast.Constant(value=""))
    first = target.elts[:1] if counted and isinstance(target, ast.Tuple) else []
    added = [e.stmt for e in window.of("augment") if window.when(e) == "always"]
    ones = [s.target for s in added if isinstance(s, ast.AugAssign) and text(s.value) == "1"]
    return {text(name) for name in (*first, *ones)}


def _function_of(window: LoopWindow, file: File) -> ast.AST:
    around = file.facts.functions_around(window.loop.node.lineno)
    return max(around, key=lambda f: f.lineno, default=file.tree)
