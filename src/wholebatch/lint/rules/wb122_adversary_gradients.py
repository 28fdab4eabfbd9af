"""A generator's backward leaves gradients in the discriminator, or the reverse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import children, dotted, place, text
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
_CUT = re.compile(r"(\.detach\(\)|\.data)$")
_REMEDIES = ("detach its output", "turn its `requires_grad_` off meanwhile")
_OFF = re.compile(r"no_grad|inference_mode")
_MAX_NAMES = 40


@rule("gradients of the other network")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per direction of a window with two networks."""
    for window in file.accumulating:
        backwards = window.backwards
        # An inner loop for each network: their windows follow each other.
        if window.shape == "nested":
            backwards = backwards + [e for e in window.after if e.kind == "backward"]
        steps = [e for e in (*window.events, *window.after) if e.kind == "step"]
        if {_is_critics(e) for e in steps} != {True, False} or file.facts.mentions(_APART):
            continue
        for of_critic in (True, False):
            found = _leak(window, backwards, of_critic)
            if found is not None:
                yield Report(
                    found[0].node,
                    f"this backward runs through `{found[1]}` and leaves gradients there that "
                    f"its own update adds up over the window; {_REMEDIES[of_critic]}",
                )


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
    contexts = [(e.node, text(c.expr)) for e in window.events for c in e.contexts(window.loop)]
    seen = {id(node) for node, spelled in contexts if _OFF.search(spelled)}
    found: dict[str, None] = {}
    todo: list[tuple[ast.AST, Env]] = [(backward.argument or ast.Pass(), backward.env)]
    while todo and len(found) < _MAX_NAMES:
        node, env = todo.pop()
        if id(node) in seen or _CUT.search(text(node)):
            continue
        seen.add(id(node))
        if isinstance(node, ast.Call):
            if (name := dotted(node.func)) and not _NOT_A_NETWORK.search(name):
                found[name] = None
            todo += [(d.expr, d.env) for d in window.resolver.returns.get(id(node), ())]
        if isinstance(node, ast.expr):
            todo += [(d.expr, d.env) for d in env.get(place(node) or "", ())]
        todo += [(child, env) for child in children(node)]
    return list(found)
