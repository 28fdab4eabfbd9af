"""Draw loops: right ones, and ones with a mistake.

Use it from elsewhere:

    for text, label in loops(seed=1, number=100):
        ...  # label is "right" or the name of the mistake
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.programs.frame import plainer
from tests.programs.plain.loop import Loop
from tests.programs.plain.mistakes import MISTAKES
from tests.programs.plain.pairs import LEAK
from tests.programs.plain.tasks import TASKS
from tests.programs.plain.text import (
    CLEARS,
    COUNTS,
    NEVER_REDUCED,
    NOISE,
    OPTIMIZERS,
    SCHEDULERS,
    script,
)

STYLES = {
    "steps": ("inline", "assign", "in place", "times", "in the mean", "gradients"),
    "own count": ("inline", "assign", "in place", "in the mean", "gradients"),
    "units": ("inline", "assign", "in the mean"),
    "share": ("inline",),
    "counted": ("inline",),
}
"""What losses are divided by, and how."""
UNITS = ("units", "share", "counted")
"""Divisors that are right for uneven micro-batches."""
DIVISORS = {
    "modulo": ("steps", "own count", "counted"),
    "from one": ("steps", "counted"),
    "counter": ("steps", "own count", "counted"),
    "nested": ("steps", "counted"),
    "while": ("steps", "counted"),
    "islice": ("steps", "own count", *UNITS),
    "split": ("steps", "own count", *UNITS),
    "accumulate": ("steps",),
}
"""The shapes of windows, and what their losses can be divided by."""
LIBRARIES = ("torch", "torch", "torch", "accelerate", "fabric", "lightning")
FORMS = ("module", "function", "main", "class")


def draw(random: Random) -> Loop:
    """Return a loop; half of them have a mistake, each mistake as often as any other."""
    planted = random.choice([*MISTAKES]) if random.random() < 0.5 else "none"
    is_coupled = planted == "none" and random.random() < 0.1
    is_pair = (planted in IN_PAIRS and not is_coupled and random.random() < 0.1) or planted == LEAK
    is_ranked = planted in ON_RANKS and not (is_coupled or is_pair) and random.random() < 0.05
    while True:
        loop = _any(random)
        if is_ranked:
            loop = replace(loop, ranks=2, library="torch", shuffle=False, missing=0)
        if is_pair:
            loop = replace(loop, **PAIR, noise=())
        if loop.of.is_right == is_coupled:
            continue
        if planted != "none":
            changed = MISTAKES[planted].plant(loop)
            if changed is None:
                continue
            loop = replace(changed, mistake=planted)
        if is_written(loop):
            return loop


IN_PAIRS = ("none", "not divided", "never cleared", "cleared per micro-batch", LEAK)
IN_PAIRS += ("tail dropped", "tail leaked", "step per micro-batch", "nominal count", "off by one")
"""The mistakes that a loop with two optimizers can have."""
PAIR = {"task": "pair", "library": "torch", "weight": "", "scheduler": "none", "clip": "none"}
PAIR |= {"amp": "none", "average": "none", "clears": "optimizer.zero_grad()"}


def _any(random: Random) -> Loop:
    steps, rows = random.choice((2, 3, 4, 4, 5)), random.choice((1, 2, 3, 4))
    shape = random.choice([*DIVISORS])
    divide = random.choice(DIVISORS[shape])
    return Loop(
        task=random.choice([*TASKS]),
        shape=shape,
        library=random.choice(LIBRARIES),
        form=random.choice(FORMS),
        divide=divide,
        style=random.choice(STYLES[divide]),
        steps=steps,
        windows=random.choice((1, 2, 3)),
        rows=rows,
        extra=random.choice((0, 0, random.randrange(1, steps))),
        missing=random.choice((0, 0, random.randrange(rows))),
        epochs=random.choice((1, 1, 2, 3)),
        weight=random.choice(("", "", "", "0.5", "2.0", "10", str(steps), "0.25")),
        optimizer=random.choice([*OPTIMIZERS]),
        scheduler=random.choice(("none", "none", "by hand", *SCHEDULERS)),
        clip=random.choice(("none", "none", "norm", "value", "loose")),
        amp=random.choice(("none", "none", "none", "bf16", "scaler off", "scaler")),
        average=random.choice(("none", "none", "none", "by hand", "torch")),
        clear=random.choice(("after", "after", "before")),
        clears=random.choice(CLEARS),
        count=random.choice([*COUNTS]),
        batch=random.choice(("tuple", "tuple", "dict", "list")),
        shuffle=random.random() < 0.4,
        noise=tuple(name for name in NOISE if random.random() < 0.2),
        holds=random.random() < 0.5,
        seed=random.randrange(1000),
    )


def is_written(loop: Loop) -> bool:
    """True if somebody could write the loop, and it is right but for its mistake."""
    task, goes_on = loop.of, loop.shape in ("nested", "while")
    is_tail_wrong = loop.mistake in ("nominal count", "tail dropped", "tail leaked")
    is_mean_wrong = loop.mistake in ("mean of token means", "mean of means", "other units")
    return all(
        (
            loop.divide in DIVISORS[loop.shape],
            loop.style in STYLES[loop.divide],
            loop.steps > 1 and loop.rows > (1 if task.is_right else 2),
            loop.extra < loop.steps and loop.missing < loop.rows,
            task.total or loop.divide not in ("units", "counted"),
            not loop.is_uneven or loop.divide in UNITS or is_mean_wrong,
            not loop.extra or loop.divide != "steps" or is_tail_wrong,
            # Windows that go on over the end of the data have no tail of their own.
            not goes_on or not (loop.extra or loop.missing),
            # A counter knows its number at the close alone.
            loop.shape != "counter" or loop.divide != "own count" or loop.style == "gradients",
            loop.shape != "modulo" or loop.divide != "own count" or loop.style != "gradients",
            loop.clear == "after" or loop.shape not in ("while", "counter"),
            loop.batch != "list" or not loop.shuffle,
            task.is_right or loop.mistake == "none",
            loop.library != "accelerate" or loop.amp == "none",
            _in_library(loop),
            loop.ranks == 1 or _is_on_ranks(loop),
            loop.task != "pair" or _is_pair(loop),
            loop.mistake != LEAK or loop.task == "pair",
            _shows(loop),
        )
    )


def _is_on_ranks(loop: Loop) -> bool:
    """True if the loop can run under DistributedDataParallel."""
    has_boundary = loop.shape in ("modulo", "from one", "while", "counter")
    return (
        loop.library == "torch"
        and loop.divide in ("steps", "own count", "units")
        and (loop.divide != "units" or loop.shape in ("islice", "split"))
        and (has_boundary or not loop.holds)
        and loop.task
        not in ("pair", "carried", "normed", "contrastive", "inside", "inside, padded")
        and loop.missing == 0
        and not loop.shuffle
        and loop.average != "torch"
        and loop.amp != "scaler"
        and loop.clears != "model.zero_grad()"
        and "evaluate" not in loop.noise
        and loop.mistake in ON_RANKS
    )


ON_RANKS = ("none", "not divided", "nominal count", "cleared per micro-batch", NEVER_REDUCED)
ON_RANKS += ("units of one rank", "world size forgotten", "divided twice")
"""The mistakes that a loop on several ranks can have."""


def _is_pair(loop: Loop) -> bool:
    """True if two optimizers can be in the loop."""
    plain = (loop.library, loop.weight, loop.scheduler, loop.clip, loop.amp, loop.average)
    return (
        plain == ("torch", "", "none", "none", "none", "none")
        and loop.divide in ("steps", "own count")
        and loop.style in ("inline", "assign")
        and loop.clears == "optimizer.zero_grad()"
        and not loop.noise
        and loop.mistake in IN_PAIRS
    )


def _in_library(loop: Loop) -> bool:
    """True if the loop can be written with its library."""
    is_by_hand = loop.library in ("torch", "accelerate", "fabric")
    if loop.shape == "accumulate":
        impossible = ("not divided", "tail dropped", "tail leaked", "step per micro-batch")
        impossible += ("cleared before the step", "a detached loss", "never cleared")
        return (
            loop.library == "accelerate"
            and loop.style == "inline"
            and not (loop.extra and loop.mistake != "nominal count")
            and loop.batch != "list"
            and loop.scheduler != "by hand"
            and loop.clip != "value"
            and "print" not in loop.noise
            and "evaluate" not in loop.noise
            and "norm" not in loop.noise
            and (loop.clear, loop.clears) == ("after", "optimizer.zero_grad()")
            and loop.mistake not in impossible
        )
    if loop.library == "lightning":
        return (
            loop.shape == "modulo"
            and loop.form == "module"
            and loop.amp in ("none", "bf16")
            and loop.batch != "list"
            and "log" not in loop.noise
            and loop.mistake not in ("a carry between micro-batches", "a detached loss")
            and (loop.mistake != "tail dropped")
        )
    return is_by_hand and not (loop.library == "fabric" and loop.amp.startswith("scaler"))


def _shows(loop: Loop) -> bool:
    """True if the loop's mistake changes its updates."""
    several = loop.windows * loop.epochs > 1
    if loop.mistake in ("step per micro-batch", "schedule per micro-batch"):
        several = several and loop.scheduler != "one cycle"  # it counts its steps
    if loop.mistake in ("step per micro-batch", "cleared before the step"):
        several = several and loop.clip != "value"  # it refuses a model without gradients
    is_of_a_number = loop.mistake in ("not divided", "divided twice", "nominal count")
    # The loss's own weight may be meant to divide, and a clip hides a factor.
    if is_of_a_number and (loop.weight or loop.clip in ("norm", "value")):
        return False
    # A weight of as many as the ranks puts back what was forgotten.
    if loop.mistake == "world size forgotten" and float(loop.weight or 1) == loop.ranks:
        return False
    return {
        "never cleared": several,
        "average per micro-batch": several,
        "schedule per micro-batch": several and loop.scheduler != "none",
        "step per micro-batch": several,
        # A scaler refuses to step without gradients.
        "cleared before the step": several and loop.amp != "scaler",
        "a detached loss": loop.amp != "scaler",
        "tail leaked": loop.clear == "after" and loop.epochs > 1,
        "mean of means": loop.missing > 0,
    }.get(loop.mistake, True)


def loops(seed: int, number: int) -> Iterator[tuple[str, str]]:
    """Yield texts and labels: "right", or the name of the mistake."""
    for place in range(number):
        loop = draw(Random(f"{seed} {place}"))
        yield script(loop), label(loop)


def label(loop: Loop) -> str:
    """Return the name of the loop's mistake; "right" if it has none."""
    if not loop.of.is_right:
        return loop.task
    return "right" if loop.mistake == "none" else loop.mistake


def smaller(loop: Loop) -> Iterator[Loop]:
    """Yield loops that somebody could write and that are plainer in one field."""
    return filter(is_written, plainer(loop))
