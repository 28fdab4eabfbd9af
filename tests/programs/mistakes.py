"""Planted mistakes: lines that people leave in a loop, and losses that do not add up.

A program with one of them must be refused or warned of, or the mistake is named on docs/laws.md, or
the update is exact all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.programs.description import LOOPS, WHOLE_BATCH, Program

EVERYWHERE = (*WHOLE_BATCH, *LOOPS, "run")
OWN_LOOPS = (*LOOPS, "run")


@dataclass(frozen=True)
class Mistake:
    """A mistake: the ways in that it can be planted in, and where docs/laws.md names it."""

    ways: tuple[str, ...] = EVERYWHERE
    given: tuple[str, ...] = ("total", "mean")
    losses: tuple[str, ...] = ("ce", "smooth", "classes", "mse", "weighted")
    listed: Mapping[str, str] = field(default_factory=dict)
    """Words of docs/laws.md that name the mistake, by way in."""


ONE_ROW = "A batch with one sample"
"""Words of docs/laws.md: where one sample alone has units, there is nothing to compare."""


def _listed(words: str, *ways: str) -> dict[str, str]:
    return dict.fromkeys(ways or LOOPS, words)


MISTAKES = {
    "mean as total": Mistake(given=("total",)),
    "total as mean": Mistake(
        given=("mean",),
        listed=_listed("a sum given as a mean that is not by one of torch's losses"),
    ),
    "units of rows": Mistake(
        given=("mean",),
        listed=_listed("a divisor that the graph does not show"),
    ),
    "units of one": Mistake(given=("mean",)),
    "units clamped": Mistake(
        given=("mean",),
        losses=("ce", "smooth", "classes"),
        listed=_listed("`units=` that are clamped to 1 where nothing counts", *EVERYWHERE),
    ),
    "mean by a loop": Mistake(
        given=("total",),
        losses=("ce", "smooth"),
        listed=_listed("a mean given as a sum where the graph does not show it"),
    ),
    "divided by steps": Mistake(ways=OWN_LOOPS),
    "regulariser": Mistake(
        given=("total",), listed=_listed("a penalty on the weights added to every sum")
    ),
    "centred": Mistake(
        listed=_listed("a model that mixes the rows of its batch, in micro-batches of one row"),
    ),
    "detached statistics": Mistake(
        given=("total",), listed=_listed("detached statistics of the micro-batch")
    ),
    "inner backward": Mistake(),
    "zero_grad": Mistake(ways=OWN_LOOPS),
    "optimizer step": Mistake(ways=OWN_LOOPS),
    "clipping": Mistake(ways=OWN_LOOPS),
    "scheduler step": Mistake(ways=OWN_LOOPS),
    "plain backward": Mistake(ways=("backward",)),
    "weights decayed": Mistake(ways=OWN_LOOPS),
}

_IN_WINDOW = "if step is None:"
DATA: dict[str, tuple[str, ...]] = {}
"""Lines after the data was drawn."""
FORWARD: dict[str, tuple[str, ...]] = {
    "centred": ("logits = logits - logits.mean(0)",),
    "inner backward": ("logits.square().sum().backward(retain_graph=True)", "model.zero_grad()"),
}
"""Lines between the forward pass and the loss."""
AFTER: dict[str, tuple[str, ...]] = {
    "zero_grad": (_IN_WINDOW, "    optimizer.zero_grad()"),
    "optimizer step": (_IN_WINDOW, "    optimizer.step()"),
    "clipping": (_IN_WINDOW, "    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"),
    "scheduler step": (_IN_WINDOW, '    optimizer.param_groups[0]["lr"] *= 0.9'),
    "plain backward": (_IN_WINDOW, "    FORWARD", "    logits.square().mean().backward()"),
    "weights decayed": (
        _IN_WINDOW,
        "    with torch.no_grad():",
        "        next(p for p in model.parameters() if p.requires_grad).mul_(0.99)",
    ),
}
"""Lines after the backward."""


def in_values(program: Program, value: dict[str, str]) -> dict[str, str]:
    """Return the expressions of a loss with the mistake in them."""
    mistake, changed = program.mistake, dict(value)
    if mistake == "mean as total":
        changed["total"] = value["mean"]
    if mistake == "total as mean":
        changed["mean"] = value["total"]
    if mistake == "units of rows":
        changed["units"] = "len(y)"
    if mistake == "units of one":
        changed["units"] = "1"
    if mistake == "units clamped":
        changed["units"] = f"{value['units']}.clamp(min=1)"
        changed["mean"] = f"{value['total']} / {changed['units']}"
    if mistake == "mean by a loop":
        changed["total"] = f"sum({value['unit']}.flatten().unbind()) / max(1, len({value['unit']}))"
    if mistake == "divided by steps":
        steps = max(len(window) for window in program.windows)
        changed["total"] = f"{value['total']} / {steps}"
        changed["mean"] = f"{value['mean']} / {steps}"
    if mistake == "regulariser":
        size = "sum(p.square().sum() for p in model.parameters() if p.requires_grad)"
        changed["total"] = f"{value['total']} + 0.1 * {size}"
    if mistake == "detached statistics":
        changed["total"] = f"{value['total']} * (1 + logits.detach().square().mean())"
    return changed
