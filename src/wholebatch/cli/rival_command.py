"""`wholebatch rival`: the accumulated batch beside its micro-batch without a window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import command, option, with_commas
from wholebatch.cli.report.terminal_output import Spinner, fitting, plain_table, say
from wholebatch.readable_sizes import bytes_said

if TYPE_CHECKING:
    from wholebatch.tune.learning_curves import Curves, LearningCurve


def _factor(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise ValueError(text)
    return float(text)


@dataclass(frozen=True)
class RivalOptions(measuring.MeasuringOptions):
    """The options of `wholebatch rival`."""

    seconds: float = measuring.seconds_option(
        60.0, "Training time of the accumulated batch.", "Measurement"
    )
    rates: list[float] | None = option(
        None,
        "FACTORS",
        "Factors of the learning rate to try for both, such as 0.5,1,2.",
        "Measurement",
        typed=str | None,
        check=with_commas(_factor, "numbers above 0, such as 0.5,1,2"),
    )
    out: Path = measuring.result_option(
        "rival.json", "Result file. An HTML page is written beside it."
    )


@command(
    RivalOptions,
    "wholebatch rival my_recipe.py --micro-batch 8",
    "wholebatch rival my_recipe.py --seconds 300 --rates 0.5,1,2",
)
def rival(options: RivalOptions) -> None:
    """Measure if the batch learns faster than its micro-batch alone.

    Both train over the same data: the accumulated batch, and the micro-batch alone, with the
    learning rate (by the square root) and the half-life of beta2 scaled to it. Shows loss, updates,
    time and memory.
    """
    measuring.measure_and_show(options, _measured, _show)


def _measured(options: RivalOptions, doing: Spinner) -> Curves:
    from wholebatch.tune import learning_curves as learning

    recipe, shared = measuring.learning_recipe(options)
    doing("measuring the speed")
    samples = learning.samples_in(options.seconds, shared, shared.base_batch)
    curves = learning.rival(shared, samples=samples, rates=options.rates or (1.0,), watch=doing)
    return learning.Curves(
        title=f"{recipe.name}: loss over the data",
        x="samples",
        y=f"loss, mean over {recipe.unit}",
        curves=[
            {"name": curve.contender.name, "x": [*x], "y": [*y]}
            for curve in curves
            for x, y in [zip(*curve.points(), strict=True)]
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
