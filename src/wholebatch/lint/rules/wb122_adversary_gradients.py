"""A generator's backward leaves gradients in the discriminator, or the reverse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Context, Env
from ..model.expressions import dotted, place, text, walk
from .rule_base import Report, rule

_CRITIC = re.compile(
    r"disc(?!ount|ard|rete|onn|h)|(?<![a-z])critic(?!al)|adversary|(?<![A-Za-z])D(?![A-Za-z])"
    r"|(net|opt\w*|model|loss|err)_?[dD](?![A-Za-z])|(?<![A-Za-z])d_\w*(loss|opt|net|model)"
)
_GENERATOR = re.compile(
    r"gen(?!eral)|(?<![A-Za-z])G(?![A-Za-z])|net_?G|vae|auto_?encoder|decoder|unet|model|vocoder"
)
_NOT_A_NETWORK = re.compile(r"loss|criterion|weight|factor|penalty|loader|opt|scale", re.I)
# Code that keeps the other network's gradients out.
_APART = re.compile(
    r"\.requires_grad(_\(\s*\w|\s*=)|set_requires_grad\w*\(|toggle_optim|freeze\w*\("
    r"|backward\([^)\n]*inputs\s*="
)
_CUT = re.compile(r"\.detach\(\)|\.data\b|stop_grad")
_MAX_NODES = 400


@rule("gradients of the other network")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per direction of a window with two networks."""
    for window in file.accumulating:
        backwards = window.backwards
        # An inner loop for each network: their windows follow each other.
        if window.shape == "nested":
            backwards = backwards + [e for e in window.after if e.kind == "backward"]
        if len(backwards) < 2 or not _trains_two(window) or file.facts.mentions(_APART):
            continue
        for of_critic in (True, False):
            found = _leak(window, backwards, of_critic)
            if found is not None:
                owner = "discriminator" if of_critic else "generator"
                remedy = (
                    "turn its `requires_grad_` off meanwhile" if of_critic else "detach its output"
                )
                yield Report(
                    found[0].node,
                    f"this backward runs through `{found[1]}` and leaves gradients in the {owner}, "
                    f"whose own update adds them up over the window; {remedy}",
                )


def _trains_two(window: LoopWindow) -> bool:
    steps = [*window.of("step"), *(e for e in window.after if e.kind == "step")]
    return {_is_critics(e) for e in steps} == {True, False}


def _is_critics(event: Event) -> bool:
    """True if an optimizer, or a network, is the discriminator's."""
    made = " ".join(text(d.expr)[:200] for d in event.env.get(event.receiver_text, ()))
    return bool(_CRITIC.search(event.receiver_text) or _CRITIC.search(made))


def _leak(window: LoopWindow, backwards: list[Event], of_critic: bool) -> tuple[Event, str] | None:
    """Return a backward that reaches the network that its own update leaves alone."""
    through = {e: _networks(e, window) for e in backwards if e.argument is not None}
    critics = [e for e in through if _CRITIC.search(text(e.argument))]  # type: ignore[arg-type]
    others = [e for e in through if e not in critics]
    critics = [e for e in critics if any(map(_CRITIC.search, through[e]))]
    own, foreign = (critics, others) if of_critic else (others, critics)
    for event in foreign if own else ():
        pattern = _CRITIC if of_critic else _GENERATOR
        names = [n for n in through[event] if pattern.search(n.rpartition(".")[2])]
        if names and not _is_cleared(event, own[0], window, of_critic):
            return event, names[0]
    return None


def _is_cleared(event: Event, own: Event, window: LoopWindow, of_critic: bool) -> bool:
    """True if the gradients that a backward leaves are cleared before the network's own."""
    if window.shape == "nested":
        zeros = [e for e in (*window.before, *window.events, *window.after) if e.kind == "zero"]
        ours = [z.order for z in zeros if _is_critics(z) is of_critic]
        # The next backward of the network itself may be in the next round.
        after, before = [z > event.order for z in ours], [z < own.order for z in ours]
        within = all if event.order < own.order else any
        return any(within(pair) for pair in zip(after, before, strict=True))
    zeros = [z for z in window.of("zero") if _is_critics(z) is of_critic]
    own_clock = "boundary" if window.shape == "boundary" else "always"
    return not zeros or any(window.when(z) != own_clock for z in zeros)


def _networks(backward: Event, window: LoopWindow) -> list[str]:
    """Return the networks that the loss of a backward was computed by, up to what is detached."""
    found: dict[str, None] = {}
    cut = {id(e.node) for e in window.events if any(_is_off(c) for c in e.path)}
    seen: set[int] = set()
    todo: list[tuple[ast.AST, Env]] = [(backward.argument or ast.Pass(), backward.env)]
    while todo and len(seen) < _MAX_NODES:
        expr, env = todo.pop()
        for node in _uncut(expr):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, ast.Call) and id(node) not in cut:
                if (name := dotted(node.func)) and not _NOT_A_NETWORK.search(name):
                    found[name] = None
                todo += [(d.expr, d.env) for d in window.resolver.returns.get(id(node), ())]
            elif isinstance(node, ast.expr) and (slot := place(node)) in env:
                todo += [(d.expr, d.env) for d in env[slot or ""]]
    return list(found)


def _is_off(item: object) -> bool:
    return isinstance(item, Context) and bool(re.search(r"no_grad|inference_mode", text(item.expr)))


def _uncut(expr: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression, without those under `.detach()`."""
    cut = {
        id(inner)
        for node in walk(expr)
        if isinstance(node, (ast.Call, ast.Attribute)) and _CUT.search(text(node)[-12:])
        for inner in walk(node)
    }
    yield from (node for node in walk(expr) if id(node) not in cut)
