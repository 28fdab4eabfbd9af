"""`wholebatch bench`: one batch through our loop, the hand-written one and other libraries'."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from wholebatch.cli.recipe_measuring import CLOCKS, check_measuring, full_batches, made, page_beside
from wholebatch.cli.run_settings import check, check_recipe
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes import Recipe
    from wholebatch.cli.run_settings import Config
    from wholebatch.tune.loop_comparison import Bench, Job

__all__ = ["bench"]

_WHAT, _HOW, _OUT = "What is measured", "How long, and beside what", "Output"


def bench(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe as for [bold]wholebatch train[/].",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples that make one update.", rich_help_panel=_WHAT),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples at a time.", rich_help_panel=_WHAT),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="full|bf16|fp16", help="Of every loop.", rich_help_panel=_WHAT),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.", rich_help_panel=_WHAT)
    ] = "auto",
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Only these, with commas; the first is what the others are compared with. "
            "Default: all that are installed.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="Of timed windows for each.", rich_help_panel=_HOW),
    ] = 4.0,
    clock: Annotated[
        str,
        typer.Option(
            metavar="wall|cpu",
            help="cpu: count this process's own time; for a CPU that others use too, and one "
            "thread.",
            rich_help_panel=_HOW,
        ),
    ] = "wall",
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.json", help="The page is written beside it.", rich_help_panel=_OUT
        ),
    ] = Path("bench.json"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print what FILE.json has, too.", rich_help_panel=_OUT),
    ] = False,
) -> None:
    """Hold every loop that accumulates beside the others: time, memory, and whether it is right.

    Ours, the hand-written one, the same under torch.compile, the batch undivided, and the
    frameworks that are installed, each as its manual shows it, on the same model and micro-batches.
    """
    check_recipe(recipe)
    check("batch_size", batch_size, "--batch-size")
    if micro_batch is not None and micro_batch < 1:
        raise OptionError(f"--micro-batch {micro_batch}: must be 1 or more")
    if precision not in (None, "full", "fp32", "bf16", "fp16"):
        raise OptionError(f"--precision {precision}: must be full, bf16 or fp16")
    check_measuring(out=out, clock=clock, seconds=seconds)

    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.cli.bench_show import Bar, show
    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import choose_device
    from wholebatch.cli.recipes import EMBEDDED, load_recipe
    from wholebatch.cli.training_run import about_here
    from wholebatch.tune.loop_comparison import WAYS
    from wholebatch.tune.loop_comparison import bench as measure

    names = None if beside is None else [name.strip() for name in beside.split(",")]
    for name in names or ():
        if name not in WAYS:
            raise OptionError(f"--beside {name}: must be of {', '.join(WAYS)}")
    where = choose_device(device)
    found = load_recipe(recipe or next(iter(EMBEDDED)))
    console = Console(stderr=as_json)
    with short_warnings(shown=True):
        config, job = _job(
            found,
            where=where,
            batch_size=batch_size,
            micro_batch=micro_batch,
            precision=precision,
        )
        about = {
            "subject": found.name,
            "date": time.strftime("%Y-%m-%d"),
            "device": _device_said(where),
            "batch_size": config.batch_size,
            "precision": config.precision,
            **about_here(),
        }
        with Bar(console) as bar:
            measured: Bench = measure(
                job,
                names,
                seconds=seconds,
                begin=bar.begin,
                end=bar.end,
                clock=CLOCKS[clock],
                about=about,
            )
    measured.write(out)
    page = page_beside(out)
    if as_json:
        print(out.read_text(encoding="utf-8"), end="")
        return
    show(console, measured, out=out, page=page)


def _job(
    recipe: Recipe,
    *,
    where: Any,
    batch_size: int | None,
    micro_batch: int | None,
    precision: str | None,
) -> tuple[Config, Job]:
    from wholebatch.cli.run_settings import Given, resolve
    from wholebatch.tune.loop_comparison import Job

    given = Given(
        batch_size=batch_size,
        micro_batch=None if micro_batch is None else str(micro_batch),
        precision=precision,
    )
    config = resolve(given, recipe.defaults, stored=None)
    size = config.micro_batch
    if not isinstance(size, int):
        raise OptionError(
            f"the recipe's micro_batch {size!r}: other loops take a number of samples only; "
            "give --micro-batch N"
        )
    config, take = full_batches(recipe, config)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = made(recipe, config, where)
        model.train()  # as other libraries' trainers have it
        return model, optimizer

    options = {} if recipe.units is None else {"units": recipe.units}
    return config, Job(
        make,
        recipe.loss,
        take,
        size,
        where,
        precision=config.autocast,
        clip_norm=config.clip_norm,
        options=options,
    )


def _device_said(device: Any) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"
