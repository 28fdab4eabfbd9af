"""`wholebatch tune`: measure settings for a recipe's batch here, and recommend the fastest."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wholebatch.cli.command_options import (
    Check,
    command,
    count_of,
    one_of,
    option,
    positive_number,
    recipe_argument,
    switch,
    with_commas,
)
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    plain_table,
    say,
    say_command,
)
from wholebatch.cli.run_settings import (
    AUTOCAST,
    like_train,
    precision_of,
    resolve,
)
from wholebatch.errors import OptionError
from wholebatch.plain_files import finite
from wholebatch.readable_sizes import bytes_said, short_count

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.cli.run_settings import Config
    from wholebatch.tune import RangeTest, Task, Tuned


def _names(of_one: Check) -> Check:
    """Return a check for names with commas, each checked by `of_one`; it returns a tuple."""

    def check(value: str, label: str) -> tuple[str, ...]:
        names = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(of_one(name, label) for name in names or [value])

    return check


def _rates(value: str, label: str) -> tuple[float, float] | None:
    """Return the lowest and the highest rate of a range test; None for "auto"."""
    if value == "auto":
        return None
    try:
        low, high = map(float, value.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low < high < float("inf"):
        raise OptionError(f"{label} {value}: must be auto, or two rates such as 1e-5,0.1")
    return low, high


@dataclass(frozen=True)
class TuneOptions:
    """The options of `wholebatch tune`."""

    recipe: str | None = recipe_argument("A recipe, as for wholebatch train.")
    batch_size: int | None = like_train("batch_size", "Samples per update.")
    micro_batch: Any = option(
        None,
        "SIZES",
        "Micro-batch sizes to try. Default: the batch in 1, 2, 4, … parts.",
        typed=str | None,
        check=with_commas(count_of, "whole numbers with commas, such as 8,16,32"),
    )
    precision: tuple[str, ...] | None = option(
        None,
        "NAMES",
        f"Precisions to try: {', '.join(AUTOCAST)}, separated by commas. Default: the recipe's, "
        "and on CUDA also bf16.",
        typed=str | None,
        check=_names(precision_of(*AUTOCAST)),
    )
    execute: tuple[str, ...] | None = option(
        None,
        "NAMES",
        "Ways to run a micro-batch: eager, compile, graph. Default: eager, and on CUDA also graph.",
        typed=str | None,
        check=_names(one_of("eager", "compile", "graph")),
    )
    memory: str = like_train(
        "memory", "Memory to use: 20GiB, 0.8 or 80% of the device, or what is free.", default="free"
    )
    seconds: float = option(
        300.0,
        "S",
        "Time for all measurements: none begins that would not end in it.",
        check=positive_number,
    )
    lr: Any = option(
        None,
        "auto|LOW,HIGH",
        "Find a learning rate instead: raise it with every update from LOW to HIGH until the loss "
        "diverges. auto: from a thousandth to a hundred times the recipe's.",
        typed=str | None,
        check=lambda value, label: (_rates(value, label),),
    )
    as_json: bool = switch("Print the results as JSON.", flag="--json")


@command(
    TuneOptions,
    "wholebatch tune my_recipe.py --batch-size 512 --memory 20GiB",
    "wholebatch tune my_recipe.py --micro-batch 8,16,32 --seconds 60",
    "wholebatch tune my_recipe.py --lr auto",
)
def tune(options: TuneOptions) -> None:
    """Find the fastest settings for a batch here, or a learning rate.

    Measures micro-batch sizes, precisions, checkpointing and ways to run, and says if accumulation
    is worth its time. Nothing is saved.
    """
    console = console_of(stderr=options.as_json)
    with Spinner(console) as doing:
        doing("importing torch")
        from wholebatch.cli.parallel_ranks import process_group
        from wholebatch.cli.recipes.recipe import load_recipe

        with process_group() as (rank, where):
            recipe = load_recipe(options.recipe)
            typed = {"batch_size": options.batch_size, "micro_batch": "auto"}
            config = resolve(typed, recipe.defaults, stored=None)
            subject = _Subject(recipe, config, where, rank)
            (_tune if options.lr is None else _range_test)(options, subject, doing)


@dataclass(frozen=True)
class _Subject:
    """The recipe to tune with its configuration, on this device and rank."""

    recipe: Recipe
    config: Config
    where: torch.device
    rank: int


def _task_of(subject: _Subject, *, micro_batch: int | None = None) -> Task:
    """Return the recipe's model, loss and full batches as a task; on several ranks under DDP."""
    from torch.nn.parallel import DistributedDataParallel as Copied

    from wholebatch.cli.parallel_ranks import copied
    from wholebatch.cli.training_run import fitted_to
    from wholebatch.distributed.process_group import world_size
    from wholebatch.tune import Task

    recipe, config, ranks = subject.recipe, subject.config, world_size()
    batches = recipe.build_batches(
        config.batch_size, seed=config.seed, rank=subject.rank, ranks=ranks
    )
    config = fitted_to(config, batches)
    whole = None if batches.length is None else batches.length // config.batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch says nothing about the others
        return batches.take()

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = recipe.build(config, subject.where)
        return copied(model), optimizer

    def loss(model: Any, micro: Any) -> Any:
        # The recipe's own module, not DDP around it: the window reduces the gradients itself.
        return recipe.loss(model.module if isinstance(model, Copied) else model, micro)

    options: dict[str, Any] = {"units": recipe.units, "clip_norm": config.clip_norm}
    if micro_batch is not None:
        options |= {"micro_batch": micro_batch, "precision": config.autocast}
    return Task(build, loss, take, options)


def _tune(options: TuneOptions, subject: _Subject, doing: Spinner) -> None:
    """Measure the settings, and print the recommendation."""
    from wholebatch.cli.provenance import versions
    from wholebatch.cli.train_command import command_line
    from wholebatch.tune import tune as tuned_by
    from wholebatch.tune.bottleneck import find_bottleneck

    began, recipe, config = time.perf_counter(), subject.recipe, subject.config
    is_pure, precisions = config.precision == "bf16-pure", options.precision
    if precisions is None:
        also = ("bf16",) if subject.where.type == "cuda" and not is_pure else ()
        precisions = tuple(dict.fromkeys((config.autocast, *also)))
    task = _task_of(subject)
    doing("measuring where the time goes")
    size = recipe.defaults.get("micro_batch")
    size = (options.micro_batch or [size if isinstance(size, int) else config.batch_size])[0]
    window = find_bottleneck(task, micro_batch=size, precision=precisions[0])
    for text in window.lines:
        say(doing.console, text)
    doing("measuring")
    tuned = tuned_by(
        task,
        memory=options.memory,
        micro_batches=options.micro_batch,
        precisions=precisions,
        executes=options.execute,
        seconds=options.seconds - (time.perf_counter() - began),
        unit=recipe.unit,
        watch=lambda trial: doing(f"measured {trial}: {trial.why or 'fits'}"),
    )
    doing.stop()
    if subject.rank:
        return
    settings = {**tuned.settings, "batch_size": config.batch_size}
    if is_pure:
        settings["precision"] = "bf16-pure"
    if options.as_json:
        parts = {"bottleneck": window.name, **vars(window)}
        about = {"recipe": recipe.known_as, "recipe_sha256": recipe.digest, "settings": settings}
        about |= {"window": parts, "versions": versions()}
        print(json.dumps({**tuned.to_dict(), **about}, indent=1))
        return
    over = f", {tuned.batch_size} on each of {tuned.ranks} ranks" if tuned.ranks > 1 else ""
    _show(doing.console, tuned, f"{recipe.name}: batch of {config.batch_size}{over}")
    switch_on = "--checkpointing" if settings.pop("checkpointing") else ""
    words = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
    words = [str(options.recipe or recipe.name), *words, switch_on]
    if tuned.compares:
        line = command_line(tuned.ranks, " ".join(filter(None, words)))
        say_command(doing.console, "Train with these settings:", line)


def _show(console: Console, tuned: Tuned, name: str) -> None:
    """Print what was tried and the recommendation."""
    say(console, f"{name}, {tuned.device}", style="bold")
    reductions = [">reduced"] if tuned.ranks > 1 else []
    names = (">steps", f">{tuned.unit}/s", ">beside row 1", ">peak", *reductions, "")
    table = plain_table("setting", *names, padding=(0, 2, 0, 0))
    first = next((it.units_per_second for it in tuned.trials if it.units_per_second), 0.0)
    for trial in tuned.trials:
        speed = trial.units_per_second
        is_first = speed == first
        row = [
            str(trial),
            str(trial.steps),
            short_count(speed) if speed else "",
            f"{speed / first - 1:+.0%}" if speed and not is_first else "",
            bytes_said(trial.peak) if trial.peak else "",
            *([f"{trial.reductions}×"] if reductions else []),
            tuned.label if trial is tuned.best else trial.why,
        ]
        table.add_row(*row, style="bold green" if trial is tuned.best else "")
    console.print(table, highlight=False)
    if reductions:
        say(console, "reduced: all-reduces of the gradients for each update")
    head, *more = tuned.advice
    say(console, head, style="bold green")
    for line in more:
        say(console, line, indent=2)


def _range_test(options: TuneOptions, subject: _Subject, doing: Spinner) -> None:
    """Raise the learning rate until the loss diverges, and print which rates to try."""
    from wholebatch.tune import range_test

    recipe = subject.recipe
    sizes = options.micro_batch or [subject.config.batch_size]
    if len(sizes) > 1:
        raise OptionError("--micro-batch with --lr: give one size, or leave it out")
    task = _task_of(subject, micro_batch=sizes[0])
    own = float(task.build()[1].param_groups[0]["lr"])
    [bounds] = options.lr
    low, high = bounds or (own / 1000, own * 100)

    def watch(update: int, rate: float) -> None:
        doing(f"learning rate {rate:.3g}", update, 100)

    result: RangeTest = range_test(task, low=low, high=high, watch=watch)
    doing.stop()
    if options.as_json:
        print(json.dumps(finite({"recipe_rate": own, **vars(result)}), indent=1))
        return
    losses, console = result.losses, doing.console
    least, most = min(losses), max(losses)
    rates = f"rate {result.rates[0]:.3g} to {result.rates[-1]:.3g}"
    say(console, f"{recipe.name}: loss {least:.3g} to {most:.3g}, {rates}", style="bold")
    for line in [*result.advice(), f"the recipe's rate is {own:g}"]:
        say(console, line)
