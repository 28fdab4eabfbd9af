"""`wholebatch tune`: measure the ways to run a recipe's batch here, and recommend one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from wholebatch.cli import recipe_measuring as measuring
from wholebatch.cli.command_options import Check, command, count_of, option, switch, with_commas
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    fitting,
    panel,
    path_from_here,
    plain_table,
    say,
    say_command,
    short_count,
    short_duration,
)
from wholebatch.cli.run_settings import PRECISIONS, resolve
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import PARTS, bytes_said

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.tune import Setting, Trial, Tuned

_HOW = "Search"
_how = partial(option, panel=_HOW)
_NUMBERS = with_commas(count_of, "whole numbers with commas, such as 8,16,32")


def _names(*allowed: str) -> Check:
    """Return a check for names with commas; it returns a tuple of them."""

    def check(value: str, label: str) -> tuple[str, ...]:
        names = [part.strip() for part in value.split(",") if part.strip()]
        for name in names or [value]:
            if name not in allowed:
                raise OptionError(f"{label} {name}: must be one of {', '.join(allowed)}")
        return tuple("full" if name == "fp32" else name for name in names)

    return check


@dataclass(frozen=True)
class TuneOptions(measuring.MeasuringOptions):
    """The options of `wholebatch tune`."""

    memory: str = option("free", "SIZE", "Memory to use: 20GiB, 80% or free.", "Batch")
    precision: tuple[str, ...] | None = _how(
        None,
        "NAMES",
        "Precisions to try: full, bf16, fp16, fp8, separated by commas. Default: the recipe's, and "
        "on CUDA also bf16.",
        typed=str | None,
        check=_names(*PRECISIONS),
    )
    execute: tuple[str, ...] | None = _how(
        None,
        "NAMES",
        "Ways to run a micro-batch: eager, compile, graph. Default: eager, and on CUDA also graph.",
        typed=str | None,
        check=_names("eager", "compile", "graph"),
    )
    micro_batch: Any = option(
        None,
        "SIZES",
        "Micro-batch sizes to try. Default: the batch in 1, 2, 4, … parts.",
        _HOW,
        typed=str | None,
        check=_NUMBERS,
    )
    seconds: float = measuring.seconds_option(300.0, "Start no new setting after this time.", _HOW)
    clock: str = measuring.clock_option(_HOW)
    exhaustive: bool = switch("Measure every setting that fits.", _HOW)
    ladder: bool = switch(
        "Also measure precision, checkpointing, accumulation and gradient offload, alone and "
        "together: memory, time and what bounds each.",
        _HOW,
    )
    bandwidth: str | None = _how(
        None, "RATE", "Bandwidth of one rank, such as 25GB/s. Adds a prediction for more ranks."
    )
    ranks: list[int] | None = option(
        None,
        "NUMBERS",
        "Numbers of ranks for --bandwidth. Default: 2,4,8,16,32,64.",
        _HOW,
        typed=str | None,
        check=_NUMBERS,
    )
    out: Path = measuring.result_option(
        "tune.json", "Result file, for wholebatch train --from. An HTML page is written beside it."
    )


@command(
    TuneOptions,
    "wholebatch tune my_recipe.py --batch-size 512 --memory 20GiB",
    "wholebatch tune my_recipe.py --micro-batch 8,16,32 --seconds 60",
    "wholebatch train my_recipe.py --from tune.json",
)
def tune(options: TuneOptions) -> None:
    """Find the fastest settings for a batch on this machine.

    Also shows the bottleneck, and if accumulation is worth its time. Then train with the settings:
    wholebatch train --from tune.json.
    """
    ranks, out = options.ranks, options.out
    if ranks is not None and options.bandwidth is None:
        given = ",".join(map(str, ranks))
        raise OptionError(f"--ranks {given}: belongs to --bandwidth, the rate of one rank's link")

    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        subject, tuned = _measured(options, doing)
    if tuned is None:
        return
    console = doing.console
    show = partial(_show, console, tuned, subject=subject)
    measuring.write_result(tuned, out, console, show, as_json=options.as_json)
    if not options.as_json:
        line = f"wholebatch train --from {path_from_here(out)}"
        say_command(console, "Train with these settings:", line)


def _measured(options: TuneOptions, doing: Spinner) -> tuple[str, Tuned | None]:
    """Return the recipe's name and what was found; None on all ranks but the first."""
    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import process_group
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.memory.budget import parse_memory
    from wholebatch.tune import parse_bandwidth

    link = None if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    with process_group(options.device) as (rank, where), short_warnings(shown=rank == 0):
        parse_memory(options.memory, device=where)
        recipe = load_recipe(options.recipe)
        doing.stop()
        with TuneProgress(doing.console, unit=recipe.unit) as progress:
            tuned = _tune(recipe, options, where=where, rank=rank, bandwidth=link, watch=progress)
    return recipe.name, None if rank else tuned


def _tune(
    recipe: Recipe, options: TuneOptions, *, where: torch.device, rank: int, **more: Any
) -> Tuned:
    import torch

    from wholebatch.cli.run_folder import about_here
    from wholebatch.distributed.process_group import world_size
    from wholebatch.tune import Limits
    from wholebatch.tune import tune as tuned_by

    # The micro-batch is what is looked for: the recipe's own does not bind.
    given = {"batch_size": options.batch_size, "micro_batch": "auto"}
    config = resolve(given, recipe.defaults, stored=None)
    is_pure, precisions = config.precision == "bf16-pure", options.precision
    if precisions is None:
        also = ("bf16",) if (where.type == "cuda" or options.ladder) and not is_pure else ()
        precisions = tuple(dict.fromkeys((config.autocast, *also)))
    elif "bf16-pure" in precisions:
        raise OptionError("--precision bf16-pure: set it in the recipe's defaults; it is then kept")
    world = world_size()
    config, take = measuring.full_batches(recipe, config, rank=rank, ranks=world)
    ddp = torch.nn.parallel.DistributedDataParallel

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = measuring.made(recipe, config, where)
        return ddp(model) if world > 1 else model, optimizer

    def loss(model: Any, micro: Any) -> Any:
        # The recipe's own module, not DDP around it: the window reduces the gradients itself.
        return recipe.loss(model.module if isinstance(model, ddp) else model, micro)

    tuned = tuned_by(
        make,
        loss=recipe.loss if world == 1 else loss,
        batches=take,
        precisions=precisions,
        memory=options.memory,
        micro_batches=options.micro_batch,
        executes=options.execute,
        limits=Limits(total=options.seconds),
        exhaustive=options.exhaustive,
        ladder=options.ladder,
        ranks=options.ranks or [2, 4, 8, 16, 32, 64],
        clock=measuring.CLOCKS[options.clock],
        unit=recipe.unit,
        units=recipe.units,
        clip_norm=config.clip_norm,
        **more,
    )
    settings = {**tuned.settings, "batch_size": config.batch_size}
    if is_pure:
        settings["precision"] = "bf16-pure"
    about = {
        "subject": recipe.name,
        "recipe": recipe.known_as,
        "recipe_sha256": recipe.digest,
        "versions": about_here(),
        "measured_on_ranks": world,
    }
    return replace(tuned, settings=settings, about=about)


class TuneProgress(Progress):
    """Shows what is measured now, the best so far, the time left; lines without a terminal."""

    def __init__(self, console: Console, *, unit: str) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("[green]{task.fields[best]}"),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._setting = self.add_task("predicting memory", total=None, best="")
        self._unit = unit
        self._began = time.perf_counter()
        self._done = 0
        self._best = 0.0

    def begin(self, setting: Setting, *, of: int) -> None:
        """Show that this setting is measured now; at most `of` are left with it."""
        best = f"best {short_count(self._best)} {self._unit}/s" if self._best else ""
        if self._done:
            each = (time.perf_counter() - self._began) / self._done
            best += f"  at most {short_duration(each * of)} left"
        self.update(
            self._setting,
            description=escape(setting.said()),
            completed=self._done,
            total=self._done + of,
            best=best,
        )

    def end(self, trial: Trial) -> None:
        """Print what was found."""
        self._done += 1
        rate = trial.units_per_second
        if rate and trial.is_measured:
            self._best = max(self._best, rate)
        speed = f"{short_count(rate)} {self._unit}/s" if rate else "no speed"
        peak = f", {bytes_said(trial.peak)}" if trial.peak else ""
        line = f"{trial.setting.said()}: {speed}{peak} ({trial.why})"
        say(self.console, line, style="dim")


def _show(console: Console, tuned: Tuned, *, subject: str) -> None:
    """Print the recommendation and why."""
    head, *more = tuned.advice
    body = [Text(head, style="bold green"), *(Text(line) for line in more)]
    title = f"{subject}: batch of {tuned.batch_size} on {tuned.device}"
    console.print(panel(title, body, "green"), highlight=False)
    console.print(fitting(_split_table(tuned), console.width), highlight=False)
    bound = tuned.bottleneck
    used = "" if bound.utilisation is None else f", utilisation {bound.utilisation:.0%}"
    say(console, f"Bottleneck: {bound.kind}{used}", style="bold")
    say(console, f"What helps: {bound.remedy}", indent=2)
    for line in (*tuned.bottleneck.evidence, *tuned.accumulation):
        say(console, line, indent=2)
    if tuned.ladder:
        from wholebatch.tune.bottleneck import REMEDIES

        console.print(fitting(_ladder(tuned), console.width), highlight=False)
        for kind in dict.fromkeys(one.bottleneck.kind for one in tuned.ladder if one.bottleneck):
            say(console, f"bound by {kind}: {REMEDIES[kind]}", indent=2)
        for rung in tuned.ladder:
            if rung.together.seconds is None:
                say(console, f"{rung.what}: {rung.together.why}", indent=2)
    if tuned.ranks is not None:
        console.print(fitting(_ranks(tuned), console.width), highlight=False)


def _split_table(tuned: Tuned) -> Table:
    table = plain_table("part of a window", ">ms", ">share")
    split = tuned.best.split
    window = sum(split.values()) or 1.0
    for part in PARTS:
        if split.get(part):
            table.add_row(part, f"{1000 * split[part]:.2f}", f"{split[part] / window:.0%}")
    return table


def _ladder(tuned: Tuned) -> Table:
    """Return the table of steps, each on top of those above it, and alone."""
    table = plain_table(
        *("step", ">peak", ">ms", ">peak alone", ">ms alone", ">utilisation", "bound by"),
        title="The ladder: each step on top of those above it, and alone",
    )
    for rung in tuned.ladder:
        cells = [*_cost(rung.together), *(_cost(rung.alone) if rung.alone else ("", ""))]
        bound = rung.bottleneck
        used = "" if bound is None or bound.utilisation is None else f"{bound.utilisation:.0%}"
        table.add_row(rung.what, *cells, used, "" if bound is None else bound.kind)
    return table


def _cost(trial: Trial) -> tuple[str, str]:
    """Return the peak and the milliseconds of a window; a prediction has no time."""
    if trial.seconds is None:
        return f"{bytes_said(trial.predicted)} predicted" if trial.predicted else "?", trial.status
    return bytes_said(trial.peak or 0), f"{1000 * trial.seconds:.1f}"


def _ranks(tuned: Tuned) -> Table:
    assert tuned.ranks is not None
    table = plain_table(
        ">ranks",
        f">{tuned.unit}/s, nothing overlapped",
        ">all overlapped",
        ">reduction",
        title=tuned.ranks["said"],
    )
    for point in tuned.ranks["points"]:
        table.add_row(
            str(point["ranks"]),
            short_count(point["units_per_second"]),
            short_count(point["units_per_second_overlapped"]),
            f"{point['communication_share']:.0%}",
        )
    return table
