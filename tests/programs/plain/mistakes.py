"""The mistakes of a loop: where each can stand, and the names that verify and lint have for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.programs.plain.loop import Loop
from tests.programs.plain.pairs import LEAK
from tests.programs.plain.text import NEVER_REDUCED


@dataclass(frozen=True)
class Mistake:
    """One mistake; `plant` changes the loop so that it can be seen, or returns None."""

    plant: Callable[[Loop], Loop | None]
    causes: tuple[str, ...]
    """The keys of verify's findings that name it."""
    codes: tuple[str, ...]
    """The rules of lint that name it."""


def _anywhere(loop: Loop) -> Loop | None:
    return loop


def _divided_by_steps(loop: Loop) -> Loop | None:
    """A mean that is divided by the number of micro-batches."""
    return loop if loop.divide in ("steps", "own count") else None


def _with_boundary(loop: Loop) -> Loop | None:
    return loop if loop.shape in ("modulo", "from one", "while") else None


def _with_tail(loop: Loop) -> Loop | None:
    if loop.shape not in ("modulo", "from one", "counter") or loop.divide == "own count":
        return None
    return replace(loop, extra=1 + loop.seed % (loop.steps - 1))


def _dropped(loop: Loop) -> Loop | None:
    if loop.shape == "islice" and loop.divide in ("steps", "units", "share"):
        return replace(loop, extra=1 + loop.seed % (loop.steps - 1))
    return _with_tail(loop)


def _leaked(loop: Loop) -> Loop | None:
    tailed = _with_tail(loop)
    if tailed is None or loop.clear != "after" or loop.divide == "counted":
        return None
    return replace(tailed, epochs=2)


def _nominal(loop: Loop) -> Loop | None:
    if loop.divide != "steps" or loop.shape in ("nested", "while", "split"):
        return None
    return replace(loop, extra=1 + loop.seed % (loop.steps - 1))


def _token_means(loop: Loop) -> Loop | None:
    if loop.divide != "steps" or loop.style == "gradients":
        return None
    task = ("tokens", "inside, padded", "shifted", "class weights")[loop.seed % 4]
    return replace(loop, task=task)


def _short_micro_batch(loop: Loop) -> Loop | None:
    if loop.divide != "steps" or loop.shape in ("nested", "while", "split") or loop.rows < 2:
        return None
    return replace(loop, missing=1)


def _clipped(loop: Loop) -> Loop | None:
    return replace(loop, clip="norm") if loop.amp != "scaler" else None


def _while_scaled(loop: Loop) -> Loop | None:
    return replace(loop, clip="norm", amp="scaler") if loop.style != "gradients" else None


def _scheduled(loop: Loop) -> Loop | None:
    return replace(loop, scheduler="step")


def _averaged(loop: Loop) -> Loop | None:
    return replace(loop, average=("by hand", "torch")[loop.seed % 2])


def _carried(loop: Loop) -> Loop | None:
    if loop.is_uneven or loop.divide == "counted" or loop.has_tail:
        return None
    return replace(loop, task="carried", epochs=1)


def _detached(loop: Loop) -> Loop | None:
    if loop.divide not in ("steps", "units", "share"):
        return None
    return loop if not loop.has_tail and loop.style not in ("gradients",) else None


def _padded(loop: Loop) -> Loop | None:
    if loop.divide not in ("units", "counted", "share"):
        return None
    return replace(loop, task=("tokens", "shifted", "class weights")[loop.seed % 3])


def _per_step(loop: Loop) -> Loop | None:
    return loop if loop.shape != "while" else None


def _ranked(loop: Loop) -> Loop | None:
    return replace(loop, ranks=2)


def _ranked_units(loop: Loop) -> Loop | None:
    if loop.divide != "units":
        return None
    return replace(loop, ranks=2, task=("tokens", "shifted", "class weights")[loop.seed % 3])


MISTAKES: dict[str, Mistake] = {
    "not divided": Mistake(_divided_by_steps, ("not-divided",), ("WB101",)),
    "divided twice": Mistake(
        lambda loop: loop if loop.divide != "own count" else None, ("divided-twice",), ("WB102",)
    ),
    "cleared per micro-batch": Mistake(
        _anywhere, ("cleared-in-the-window", "only-the-last"), ("WB104",)
    ),
    "cleared before the step": Mistake(
        _anywhere, ("no-update", "cleared-in-the-window", "left-out", "only-the-last"), ("WB117",)
    ),
    "never cleared": Mistake(_anywhere, ("never-cleared",), ("WB122",)),
    "tail dropped": Mistake(_dropped, ("no-update",), ("WB109",)),
    "tail leaked": Mistake(_leaked, ("no-update", "never-cleared"), ("WB109",)),
    "nominal count": Mistake(_nominal, ("nominal-count",), ("WB109",)),
    "mean of token means": Mistake(_token_means, ("mean-of-means",), ("WB103",)),
    "mean of means": Mistake(_short_micro_batch, ("mean-of-means",), ("WB103", "WB109")),
    "other units": Mistake(_padded, ("other-units",), ("WB103",)),
    "clip per micro-batch": Mistake(_clipped, ("clipped-per-micro-batch",), ("WB105",)),
    "clip while scaled": Mistake(_while_scaled, ("clipped-while-scaled",), ("WB106",)),
    "schedule per micro-batch": Mistake(_scheduled, ("scheduled-per-micro-batch",), ("WB107",)),
    "average per micro-batch": Mistake(_averaged, ("averaged-per-micro-batch",), ()),
    "step per micro-batch": Mistake(_per_step, ("stepped-every-micro-batch",), ("WB119",)),
    "off by one": Mistake(
        lambda loop: loop if loop.shape in ("modulo", "from one") else None,
        ("only-the-first", "left-out", "no-update"),
        ("WB110",),
    ),
    "backward at the boundary": Mistake(_with_boundary, ("only-the-last",), ("WB118",)),
    "decayed per micro-batch": Mistake(_anywhere, ("moved-in-the-window",), ()),
    "a carry between micro-batches": Mistake(_carried, (), ()),
    LEAK: Mistake(lambda loop: replace(loop, task="pair"), (), ()),
    "a detached loss": Mistake(_detached, ("only-the-last",), ()),
    NEVER_REDUCED: Mistake(_ranked, ("unsynchronised-ranks",), ()),
    "units of one rank": Mistake(_ranked_units, ("mean-of-means", "other-units"), ()),
    "world size forgotten": Mistake(_ranked_units, ("world-size-forgotten", "divided-twice"), ()),
    "counted twice": Mistake(_anywhere, ("counted-twice", "not-divided"), ()),
}
BESIDE = ("average per micro-batch",)
"""Mistakes that leave every step as it is."""
