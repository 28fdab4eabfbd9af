"""`wholebatch bench`: one batch through our loop, the hand-written one and other libraries'."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import command, must_be, option
from wholebatch.cli.report.terminal_output import Spinner, fitting, plain_table, say
from wholebatch.cli.run_settings import Config, resolve
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import bytes_said

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.tune.loop_comparison import LoopComparison, LoopRow
    from wholebatch.tune.training_loops import Job

_HOW = "Measurement"


@dataclass(frozen=True)
class BenchOptions(measuring.MeasuringOptions):
    """The options of `wholebatch bench`."""

    precision: str | None = option(
        None,
        "full|bf16|fp16|fp8",
        "Precision of every loop; with fp8, the others compute in bf16.",
        "Batch",
        check=must_be(
            "full, bf16, fp16 or fp8", lambda it: it in ("full", "fp32", "bf16", "fp16", "fp8")
        ),
    )
    beside: str | None = option(
        None,
        "NAMES",
        "Run only these loops, separated by commas; the others are compared with the first. "
        "Default: all that are installed.",
        _HOW,
    )
    seconds: float = measuring.seconds_option(4.0, "Timed seconds per loop.", _HOW)
    clock: str = measuring.clock_option(_HOW)
    out: Path = measuring.result_option(
        "bench.json", "Result file. An HTML page is written beside it."
    )


@command(
    BenchOptions,
    "wholebatch bench my_recipe.py --micro-batch 8",
    "wholebatch bench my_recipe.py --beside wholebatch,loop --seconds 10",
)
def bench(options: BenchOptions) -> None:
    """Benchmark accumulation loops: time, memory, gradient error.

    The loops are wholebatch, a hand-written loop, the same under torch.compile, the undivided batch
    and the installed frameworks. Each framework is used as its manual shows. All get the same model
    and micro-batches.
    """
    measuring.measure_and_show(options, _bench, _show)


def _bench(options: BenchOptions, doing: Spinner) -> LoopComparison:
    from wholebatch.cli.parallel_ranks import choose_device
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.run_folder import about_here
    from wholebatch.tune.loop_comparison import bench as measure
    from wholebatch.tune.training_loops import LOOPS

    beside = options.beside
    names = None if beside is None else [name.strip() for name in beside.split(",")]
    for name in names or ():
        if name not in LOOPS:
            raise OptionError(f"--beside {name}: must be one of {', '.join(LOOPS)}")
    where = choose_device(options.device)
    recipe = load_recipe(options.recipe)
    doing("reading the data")
    config, job = _job(recipe, options, where)
    about = {
        "subject": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "device": _device_text(where),
        "batch_size": config.batch_size,
        "precision": config.precision,
        **about_here(),
    }
    return measure(
        job,
        names,
        seconds=options.seconds,
        begin=doing,
        end=partial(_say_row, doing.console),
        clock=measuring.CLOCKS[options.clock],
        about=about,
    )


def _job(recipe: Recipe, options: BenchOptions, where: torch.device) -> tuple[Config, Job]:
    from wholebatch.tune.training_loops import Job

    names = ("batch_size", "micro_batch", "precision")
    given = {name: getattr(options, name) for name in names}
    config = resolve(given, recipe.defaults, stored=None)
    size = config.micro_batch
    if not isinstance(size, int):
        raise OptionError(
            f"the recipe's micro_batch {size!r}: other loops take a number of samples only; "
            "give --micro-batch N"
        )
    config, take = measuring.full_batches(recipe, config)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = measuring.made(recipe, config, where)
        model.train()  # as other libraries' trainers have it
        return model, optimizer

    return config, Job(
        make,
        recipe.loss,
        take,
        size,
        where,
        precision=config.autocast,
        clip_norm=config.clip_norm,
        options={} if recipe.units is None else {"units": recipe.units},
    )


def _device_text(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def _say_row(console: Console, row: LoopRow) -> None:
    """Print the time of one loop as soon as it is measured."""
    found = row.why if row.window is None else f"{1000 * row.window:.1f} ms a window"
    say(console, f"{row.name}: {found}", style="dim")


def _show(console: Console, measured: LoopComparison) -> None:
    """Print the table, and what to know beside it. A wrong gradient is red, the fastest green."""
    about = measured.about
    batch = f"batch of {about.get('batch_size')} in {measured.steps} × {measured.micro_batch}"
    head = f"{about.get('subject')}: {batch}, {about.get('precision')}, {about.get('device')}"
    say(console, head, style="bold")
    rows = [row for row in measured.rows if row.window is not None]
    right = [row.window for row in rows if row.window and not row.is_wrong]
    first = measured.rows[0]
    table = plain_table("loop", ">ms/window", ">memory", f"~beside {first.name}")
    for row in rows:
        fastest = "green" if row.window == min(right, default=None) else ""
        table.add_row(
            escape(row.name),
            f"{1000 * (row.window or 0):.1f}",
            bytes_said(row.peak) if row.peak else "–",
            row.summary(first) or "–",
            style="red" if row.is_wrong else fastest,
        )
    console.print(fitting(table, console.width), highlight=False)
    for note in measured.notes:
        say(console, note, indent=2)
