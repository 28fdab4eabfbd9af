"""`wholebatch tune`: measure the ways to run a recipe's batch here, and recommend one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from wholebatch.cli.recipe_measuring import CLOCKS, check_measuring, full_batches, made, page_beside
from wholebatch.cli.run_settings import PRECISIONS, check, check_recipe
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes import Recipe
    from wholebatch.tune import Tuned

__all__ = ["tune"]

_EXECUTES = ("eager", "compile", "graph")
_WHAT, _HOW, _OUT = "What is tuned", "How long, and over what", "Output"


def tune(
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
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help='What may be used: "20GiB", "80%", or what is free.',
            rich_help_panel=_WHAT,
        ),
    ] = "free",
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.", rich_help_panel=_WHAT)
    ] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of full, bf16, fp16, with commas. Default: the recipe's, and bf16 too on CUDA.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    execute: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of eager, compile, graph. Default: eager, and graph too on CUDA.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="With commas. Default: the batch in 1, 2, 4, … parts.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="Begin no new setting after this long.", rich_help_panel=_HOW
        ),
    ] = 300.0,
    clock: Annotated[
        str,
        typer.Option(
            metavar="wall|cpu",
            help="cpu: count this process's own time; for a CPU that others use too, and one "
            "thread.",
            rich_help_panel=_HOW,
        ),
    ] = "wall",
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Measure everything that fits.", rich_help_panel=_HOW),
    ] = False,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help='Of one rank\'s link, such as "25GB/s": adds a model of more ranks.',
            rich_help_panel=_HOW,
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="For the model of --bandwidth. Default: 2,4,8,16,32,64.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.json",
            help="For [bold]wholebatch train --from[/]; the page is written beside it.",
            rich_help_panel=_OUT,
        ),
    ] = Path("tune.json"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print what FILE.json has, too.", rich_help_panel=_OUT),
    ] = False,
) -> None:
    """Find the fastest settings for a batch here, what holds them back, and whether to accumulate.

    Then: wholebatch train --from tune.json
    """
    check_recipe(recipe)
    check("batch_size", batch_size, "--batch-size")
    names = None if precision is None else _names("--precision", precision, PRECISIONS)
    sizes = None if micro_batch is None else _numbers("--micro-batch", micro_batch)
    numbers = _numbers("--ranks", "2,4,8,16,32,64" if ranks is None else ranks)
    if ranks is not None and bandwidth is None:
        raise OptionError(f"--ranks {ranks}: belongs to --bandwidth, the rate of one rank's link")
    ways = None if execute is None else _names("--execute", execute, _EXECUTES)
    check_measuring(out=out, clock=clock, seconds=seconds)

    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import process_group
    from wholebatch.cli.recipes import EMBEDDED, load_recipe
    from wholebatch.cli.tune_show import Bar, show
    from wholebatch.memory.budget import parse_memory
    from wholebatch.tune import Limits, parse_bandwidth

    link = None if bandwidth is None else parse_bandwidth(bandwidth)
    with process_group(device) as (rank, where), short_warnings(shown=rank == 0):
        parse_memory(memory, device=where)
        found = load_recipe(recipe or next(iter(EMBEDDED)))
        console = (
            Console(stderr=as_json) if rank == 0 else Console(quiet=True, force_terminal=False)
        )
        with Bar(console, unit=found.unit) as bar:
            tuned = _tune(
                found,
                where=where,
                rank=rank,
                batch_size=batch_size,
                precisions=names,
                memory=memory,
                micro_batches=sizes,
                executes=ways,
                limits=Limits(total=seconds),
                exhaustive=exhaustive,
                bandwidth=link,
                ranks=numbers,
                watch=bar,
                clock=CLOCKS[clock],
            )
    if rank:
        return
    tuned.write(out)
    page = page_beside(out)
    if as_json:
        print(out.read_text(encoding="utf-8"), end="")
        return
    show(console, tuned, subject=found.name, out=out, page=page)


def _tune(
    recipe: Recipe,
    *,
    where: torch.device,
    rank: int,
    batch_size: int | None,
    precisions: tuple[str, ...] | None,
    **options: Any,
) -> Tuned:
    import dataclasses

    import torch

    from wholebatch.cli.run_settings import Given, resolve
    from wholebatch.cli.training_run import about_here
    from wholebatch.tune import tune as tuned_by

    # The micro-batch is what is looked for: the recipe's own does not bind.
    given = Given(batch_size=batch_size, micro_batch="auto")
    config = resolve(given, recipe.defaults, stored=None)
    is_pure = config.precision == "bf16-pure"
    if precisions is None:
        more = ("bf16",) if where.type == "cuda" and not is_pure else ()
        precisions = tuple(dict.fromkeys((config.autocast, *more)))
    elif "bf16-pure" in precisions:
        raise OptionError("--precision bf16-pure: set it in the recipe's defaults; it is then kept")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config, take = full_batches(recipe, config, rank=rank, ranks=world)
    inner: list[Any] = []

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = made(recipe, config, where)
        inner[:] = [model]
        if world > 1:
            return torch.nn.parallel.DistributedDataParallel(model), optimizer
        return model, optimizer

    def loss(model: Any, micro: Any) -> Any:
        # The recipe's own module, not DDP around it: the window reduces the gradients itself.
        return recipe.loss(inner[0] if hasattr(model, "module") else model, micro)

    tuned = tuned_by(
        make,
        loss=recipe.loss if world == 1 else loss,
        batches=take,
        precisions=precisions,
        unit=recipe.unit,
        units=recipe.units,
        clip_norm=config.clip_norm,
        **options,
    )
    settings = {**tuned.settings, "batch_size": config.batch_size}
    if is_pure:
        settings["precision"] = "bf16-pure"
    about = {
        "subject": recipe.name,
        "recipe": recipe.name if recipe.is_embedded else str(recipe.path),
        "recipe_sha256": recipe.digest,
        "versions": about_here(),
        "measured_on_ranks": world,
    }
    return dataclasses.replace(tuned, settings=settings, about=about)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _names(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    for name in _split(text) or [text]:
        if name not in allowed:
            raise OptionError(f"{option} {name}: must be one of {', '.join(allowed)}")
    return tuple("full" if name == "fp32" else name for name in _split(text))


def _numbers(option: str, text: str) -> list[int]:
    parts = _split(text)
    if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise OptionError(f"{option} {text}: must be whole numbers with commas, such as 8,16,32")
    return [int(part) for part in parts]
