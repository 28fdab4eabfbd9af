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
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import command, must_be, option, recipe_argument, whole_number
from wholebatch.cli.report.terminal_output import plain_table
from wholebatch.cli.run_settings import Config, resolve
from wholebatch.core.readable_sizes import bytes_said
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes import Recipe
    from wholebatch.tune.loop_comparison import LoopComparison, LoopRow
    from wholebatch.tune.training_loops import Job

_HOW, _OUT = "How long, and beside what", "Output"
_what = partial(option, panel="What is measured")
_how, _out = (partial(option, panel=panel) for panel in (_HOW, _OUT))
_WRONG = 0.01  # from here on it is no rounding: another gradient than that of the batch


@dataclass(frozen=True)
class BenchOptions:
    """The options of `wholebatch bench`."""

    recipe: str | None = recipe_argument("A recipe as for [bold]wholebatch train[/].")
    batch_size: int | None = _what(None, "N", "Samples that make one update.", check=whole_number())
    micro_batch: int | None = _what(
        None,
        "N",
        "Samples at a time.",
        check=must_be("1 or more", lambda value: value >= 1),
    )
    precision: str | None = _what(
        None,
        "full|bf16|fp16",
        "Of every loop.",
        check=must_be("full, bf16 or fp16", lambda it: it in ("full", "fp32", "bf16", "fp16")),
    )
    device: str = _what("auto", "auto|cpu|cuda", "Where to run.")
    beside: str | None = _how(
        None,
        "NAMES",
        "Only these, with commas; the first is what the others are compared with. Default: all "
        "that are installed.",
    )
    seconds: float = measuring.seconds_option(4.0, "Of timed windows for each.", _HOW)
    clock: str = measuring.clock_option(_HOW)
    out: Path = measuring.result_option("bench.json", "The page is written beside it.", _OUT)
    as_json: bool = _out(False, None, "Print what FILE.json has, too.", flag="--json")


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Hold every loop that accumulates beside the others: time, memory, and whether it is right.

    Ours, the hand-written one, the same under torch.compile, the batch undivided, and the
    frameworks that are installed, each as its manual shows it, on the same model and micro-batches.
    """
    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import choose_device
    from wholebatch.cli.recipes import load_recipe
    from wholebatch.cli.run_folder import about_here
    from wholebatch.tune.loop_comparison import bench as measure
    from wholebatch.tune.training_loops import LOOPS

    beside = options.beside
    names = None if beside is None else [name.strip() for name in beside.split(",")]
    for name in names or ():
        if name not in LOOPS:
            raise OptionError(f"--beside {name}: must be of {', '.join(LOOPS)}")
    where = choose_device(options.device)
    recipe = load_recipe(options.recipe)
    console = Console(stderr=options.as_json)
    with short_warnings(shown=True):
        config, job = _job(recipe, options, where)
        about = {
            "subject": recipe.name,
            "date": time.strftime("%Y-%m-%d"),
            "device": _device_text(where),
            "batch_size": config.batch_size,
            "precision": config.precision,
            **about_here(),
        }
        with BenchProgress(console) as progress:
            measured: LoopComparison = measure(
                job,
                names,
                seconds=options.seconds,
                begin=progress.begin,
                end=progress.end,
                clock=measuring.CLOCKS[options.clock],
                about=about,
            )
    show = partial(_show, console, measured)
    measuring.write_result(measured, options.out, console, show, as_json=options.as_json)


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


class BenchProgress(Progress):
    """Shows the loop that is measured now, and for how long; lines without a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._loop = self.add_task("reading the data", total=None)

    def begin(self, name: str) -> None:
        """Show that this loop is measured now."""
        self.reset(self._loop, description=escape(name))

    def end(self, row: LoopRow) -> None:
        """Print what was found."""
        found = row.why if row.window is None else f"{1000 * row.window:.1f} ms a window"
        line = f"{row.name}: {found}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")


def _show(console: Console, measured: LoopComparison) -> None:
    """Print the table, and what to know beside it."""
    about = measured.about
    table = plain_table(
        "",
        ">ms a window",
        ">× first",
        ">memory",
        ">gradient off by",
        title=escape(
            f"{about.get('subject', '')}: a batch of {about.get('batch_size', '')} in "
            f"{measured.steps} × {measured.micro_batch}, {about.get('precision', '')}, "
            f"{about.get('device', '')}"
        ),
        title_justify="left",
        padding=(0, 2, 0, 0),
    )
    table.columns[0].no_wrap = True
    first = measured.rows[0].window
    fastest = min((row.window for row in measured.rows if row.window), default=None)
    for row in measured.rows:
        if row.window is None:
            continue
        style = "bold green" if row.window == fastest else ""
        table.add_row(
            escape(row.name),
            f"{1000 * row.window:.1f}",
            f"{row.window / first:.2f}" if first else "–",
            bytes_said(row.peak) if row.peak else "–",
            _off_text(row.off),
            style=style,
        )
    console.print(table, highlight=False)
    for note in measured.notes:
        console.print(f"  {escape(note)}", highlight=False, soft_wrap=True)


def _off_text(off: float | None) -> str:
    if off is None:
        return "–"
    return f"[bold red]{off:.0%}[/]" if off > _WRONG else f"{off:.1g}"
