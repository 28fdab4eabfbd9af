"""`wholebatch rival`: the accumulated batch beside its micro-batch without a window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import command, option, recipe_argument, whole_number
from wholebatch.cli.report.terminal_output import Spinner, console_of, fitting, plain_table, say
from wholebatch.core.readable_sizes import bytes_said
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    from wholebatch.tune.learning_curves import Curves, LearningCurve

_batch, _how, _out = (partial(option, panel=name) for name in ("Batch", "Measurement", "Output"))


def _factors(value: str, label: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < factor < 1e6 for factor in found):
        raise OptionError(f"{label} {value}: must be numbers above 0, such as 0.5,1,2")
    return found


@dataclass(frozen=True)
class RivalOptions:
    """The options of `wholebatch rival`."""

    recipe: str | None = recipe_argument("A recipe, as for wholebatch train.")
    batch_size: int | None = _batch(
        None, "N", "Samples per update of the accumulated batch.", check=whole_number()
    )
    micro_batch: int | None = _batch(
        None, "N", "Samples per micro-batch, and per update of the rival.", check=whole_number()
    )
    device: str = _batch("auto", "auto|cpu|cuda", "Device.")
    seconds: float = measuring.seconds_option(
        60.0, "Training time of the accumulated batch.", "Measurement"
    )
    rates: tuple[float, ...] | None = _how(
        None,
        "FACTORS",
        "Factors of the learning rate to try for both, such as 0.5,1,2.",
        typed=str | None,
        check=_factors,
    )
    out: Path = measuring.result_option(
        "rival.json", "Result file. An HTML page is written beside it.", "Output"
    )
    as_json: bool = _out(False, None, "Print the results as JSON.", flag="--json")


@command(
    RivalOptions,
    "wholebatch rival my_recipe.py --micro-batch 8",
    "wholebatch rival my_recipe.py --seconds 300 --rates 0.5,1,2",
)
def rival(options: RivalOptions) -> None:
    """Measure if the batch learns faster than its micro-batch alone.

    Both train over the same data: the batch, accumulated; and its micro-batch without a window,
    with the learning rate (by the square root) and the half-life of beta2 scaled to it. Shows loss,
    updates, time and memory.
    """
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        found = _measured(options, doing)
    show = partial(_show, doing.console, found)
    measuring.write_result(found, options.out, doing.console, show, as_json=options.as_json)


def _measured(options: RivalOptions, doing: Spinner) -> Curves:
    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.tune import learning_curves as learning

    with short_warnings(shown=True):
        recipe, shared = measuring.learning_recipe(options)
        doing("measuring the speed")
        samples = learning.samples_in(options.seconds, shared, shared.base_batch)
        curves = learning.rival(shared, samples=samples, rates=options.rates or (1.0,), watch=doing)
    return learning.Curves(
        title=f"{recipe.name}: loss over the data",
        x="samples",
        y=f"loss, mean over {recipe.unit}",
        curves=[
            {
                "name": c.contender.name,
                "x": [s for s, _ in c.points()],
                "y": [y for _, y in c.points()],
            }
            for c in curves
        ],
        rows=[_row(curve) for curve in curves],
        advice=_advice(curves, samples),
        about={"subject": recipe.name, "samples": samples},
    )


def _row(curve: LearningCurve) -> dict[str, object]:
    held_out = {"held-out": round(curve.held_out[-1][2], 4)} if curve.held_out else {}
    return {
        "run": curve.contender.name,
        "batch": curve.contender.batch,
        "updates": len(curve.updates),
        "loss": round(curve.loss, 4),
        **held_out,
        "seconds": round(curve.seconds, 2),
        "peak_bytes": curve.peak,
    }


def _advice(curves: list[LearningCurve], samples: int) -> list[str]:
    """Return what the best run of each kind says; `curves` alternate between the two."""
    whole, alone = (min(curves[kind::2], key=lambda c: c.loss) for kind in (0, 1))
    better = "accumulated" if whole.loss < alone.loss else "micro-batch alone"
    reached = alone.reaches(whole.loss)
    lines = [
        f"lower loss over the same {samples:,} samples: {better} (accumulated {whole.loss:.4f}, "
        f"micro-batch alone {alone.loss:.4f})",
        f"time: accumulated {whole.seconds:.1f} s for {len(whole.updates)} updates, alone "
        f"{alone.seconds:.1f} s for {len(alone.updates)}",
        f"memory: accumulated {bytes_said(whole.peak)}, alone {bytes_said(alone.peak)}",
    ]
    if whole.held_out and alone.held_out:
        ends = whole.held_out[-1][2], alone.held_out[-1][2]
        better = "accumulated" if ends[0] < ends[1] else "micro-batch alone"
        lines.append(
            f"lower loss on held-out data: {better} (accumulated {ends[0]:.4f}, micro-batch alone "
            f"{ends[1]:.4f})"
        )
    if reached is not None:
        share = f"{reached[1] / samples:.0%}"
        lines.append(f"alone reaches the loss of the accumulated batch after {share} of the data")
    return lines


def _show(console: Console, found: Curves) -> None:
    _, *names, _ = found.rows[0]
    table = plain_table("run", *(f">{name}" for name in names), ">memory")
    for row in found.rows:
        *cells, peak = row.values()
        table.add_row(*map(str, cells), bytes_said(peak))
    console.print(fitting(table, console.width), highlight=False)
    for line in found.advice:
        say(console, line)
