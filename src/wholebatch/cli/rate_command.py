"""`wholebatch rate`: the learning-rate range test, with a plot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import command, option, positive_number, whole_number
from wholebatch.cli.report.terminal_output import Spinner, say

if TYPE_CHECKING:
    from wholebatch.tune.learning_curves import Curves, RangeTest

_how = partial(option, panel="Rates")
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RateOptions(measuring.MeasuringOptions):
    """The options of `wholebatch rate`."""

    low: float | None = _how(
        None, "RATE", "First rate. Default: a thousandth of the recipe's.", check=positive_number
    )
    high: float | None = _how(
        None, "RATE", "Last rate. Default: a hundred times the recipe's.", check=positive_number
    )
    updates: int = _how(100, "N", "Number of updates.", check=whole_number(10))
    out: Path = measuring.result_option(
        "rate.json", "Result file. An HTML page with the plot is written beside it."
    )


@command(
    RateOptions,
    "wholebatch rate my_recipe.py",
    "wholebatch rate my_recipe.py --low 1e-5 --high 1 --updates 200",
)
def rate(options: RateOptions) -> None:
    """Find a learning rate: raise it until the loss diverges.

    The range test of Smith (2017): the rate grows by the same factor with every update of the
    whole batch, without the recipe's schedule. The trained weights are discarded.
    """
    measuring.measure_and_show(options, _measured, _show)


def _measured(options: RateOptions, doing: Spinner) -> Curves:
    from wholebatch.tune import learning_curves as learning

    recipe, shared = measuring.learning_recipe(options)
    own = float(shared.make()[1].param_groups[0]["lr"])
    low, high = options.low or own / 1000, options.high or own * 100
    found = learning.range_test(shared, low=low, high=high, updates=options.updates, watch=doing)
    return learning.Curves(
        title=f"{recipe.name}: loss while the learning rate rises",
        x="learning rate",
        y=f"loss, mean over {recipe.unit}, smoothed",
        curves=[{"name": "loss", "x": list(found.rates), "y": list(found.losses)}],
        rows=[],
        advice=_advice(found, own),
        about={"subject": recipe.name, "batch_size": shared.base_batch, "recipe_rate": own},
        log_x=True,
    )


def _advice(found: RangeTest, own: float) -> list[str]:
    lines = [
        f"steepest fall at {found.steepest:.3g}, lowest loss at {found.lowest:.3g}; try "
        f"{min(found.steepest, found.lowest / 3):.2g} to {found.lowest / 3:.2g}",
        f"the rate of the recipe is {own:g}",
    ]
    if found.diverges is None:
        return [*lines, f"no divergence up to {found.rates[-1]:.3g}: give a larger --high"]
    return [*lines, f"the loss has doubled at {found.diverges:.3g}"]


def _show(console: Console, found: Curves) -> None:
    x, y = found.curves[0]["x"], found.curves[0]["y"]
    low, high = min(y), max(y)
    columns = min(len(y), console.width)  # a narrow terminal shows every second loss, or fewer
    shown = (y[place * len(y) // columns] for place in range(columns))
    heights = (int(7.999 * (loss - low) / (high - low or 1.0)) for loss in shown)
    say(console, f"loss {low:.3g} to {high:.3g}, rate {x[0]:.3g} to {x[-1]:.3g}", style="bold")
    say(console, "".join(_BLOCKS[height] for height in heights))
    for line in found.advice:
        say(console, line)
