"""The parts that commands share which measure a recipe: options, full batches, the page."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from wholebatch.cli.command_options import choice, option, recipe_argument, switch, whole_number
from wholebatch.cli.report.terminal_output import Spinner, console_of, path_from_here, say
from wholebatch.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.cli.run_settings import Config
    from wholebatch.tune.learning_curves import Recipe as LearningRecipe

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def clock_option(panel: str) -> Any:
    """Declare `--clock`: which time is measured."""
    help = "cpu counts only this process's time: for a busy machine and one thread."
    return choice("|".join(CLOCKS), help, panel)


def seconds_option(default: float, help: str, panel: str) -> Any:
    """Declare `--seconds`: how long is measured."""

    def check(value: float, label: str) -> float:
        if not value > 0:
            raise OptionError(f"{label} {value:g}: must be above 0")
        return value

    return option(default, "S", help, panel, check=check)


def result_option(default: str, help: str) -> Any:
    """Declare `--out`: the JSON file of the results, which must be writable before hours pass."""

    def check(out: Path, label: str) -> Path:
        if out.suffix != ".json":
            raise OptionError(f"{label} {out}: must be the name of a .json file")
        if out.is_dir():
            raise OptionError(f"{label} {out}: is a folder; give the name of a file")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=out.parent):
                pass
            if out.exists() and not os.access(out, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise OptionError(f"{label} {out}: cannot be written: {error.strerror}") from error
        return out

    return option(Path(default), "FILE.json", help, "Output", check=check)


def full_batches(
    recipe: Recipe, config: Config, *, rank: int = 0, ranks: int = 1
) -> tuple[Config, Callable[[], Any]]:
    """Return the settings as the data has them, and a function that returns the next full batch.

    Of several ranks this one's share; epoch after epoch.
    """
    from wholebatch.cli.training_run import fitted_to

    batches = recipe.build_batches(config.batch_size, seed=config.seed, rank=rank, ranks=ranks)
    config = fitted_to(config, batches)
    whole = None if batches.length is None else batches.length // config.batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch says nothing about the others
        return batches.take()

    return config, take


def made(
    recipe: Recipe, config: Config, where: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the recipe's model on its device and its optimizer, the same every time."""
    import torch

    from wholebatch.cli.training_run import seed_generators

    seed_generators(config.seed)
    model = recipe.build_model()
    model.to(where, torch.bfloat16 if config.precision == "bf16-pure" else None)
    return model, recipe.build_optimizer(model, lr=config.lr)


@dataclass(frozen=True)
class MeasuringOptions:
    """The options that all commands share which measure a recipe."""

    recipe: str | None = recipe_argument("A recipe, as for wholebatch train.")
    batch_size: int | None = option(None, "N", "Samples per update.", "Batch", check=whole_number())
    micro_batch: Any = option(
        None, "N", "Samples per micro-batch.", "Batch", typed=int, check=whole_number()
    )
    device: str = option("auto", "auto|cpu|cuda", "Device.", "Batch")
    as_json: bool = switch("Print the results as JSON.", "Output", flag="--json")


def learning_recipe(options: MeasuringOptions) -> tuple[Recipe, LearningRecipe]:
    """Return the recipe, and the parts of its runs: the model, and the data from its start."""
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.run_settings import resolve

    recipe = load_recipe(options.recipe)
    given = {"batch_size": options.batch_size, "micro_batch": options.micro_batch}
    config = resolve(given, recipe.defaults, stored=None)
    return recipe, _parts_of_runs(recipe, config, options.device)


def _parts_of_runs(recipe: Recipe, config: Config, device: str) -> LearningRecipe:
    from wholebatch.cli.parallel_ranks import choose_device
    from wholebatch.cli.training_run import fitted_to
    from wholebatch.tune.learning_curves import Recipe as LearningRecipe

    where = choose_device(device)
    batches = recipe.build_batches(config.batch_size, seed=config.seed)
    config = fitted_to(config, batches)
    if batches.kind == "loader":
        raise OptionError(
            "the recipe's DataLoader makes the batches: return the dataset from data() instead"
        )
    if not isinstance(config.micro_batch, int):
        raise OptionError(f"the micro-batch is {config.micro_batch!r}: give --micro-batch N")

    def source() -> Callable[[int], Any]:
        batches = recipe.build_batches(config.batch_size, seed=config.seed)
        size = config.batch_size
        batches.follow(lambda epoch: size)

        def take(samples: int) -> Any:
            nonlocal size
            size = samples
            return batches.take()

        return take

    def held_out(model: torch.nn.Module) -> float:
        from wholebatch.cli.validation import held_out_sums, mean_loss

        assert isinstance(config.micro_batch, int)
        return mean_loss([held_out_sums(recipe, config, model, where, size=config.micro_batch)])

    optimizer = made(recipe, config, where)[1]
    adaptive = all("betas" in group for group in optimizer.param_groups)
    options: dict[str, Any] = {"precision": config.autocast, "clip_norm": config.clip_norm}
    return LearningRecipe(
        lambda: made(recipe, config, where),
        recipe.loss,
        source,
        micro_batch=config.micro_batch,
        base_batch=config.batch_size,
        rule="sqrt" if adaptive else "linear",
        schedule=lambda optimizer, steps: recipe.build_scheduler(optimizer, steps=steps),
        options={**options, "units": recipe.units},
        held_out=held_out if recipe.has_validation else None,
    )


class Result(Protocol):
    """The results of a measurement."""

    def write(self, path: Path) -> None: ...


def measure_and_show(
    options: Any, measure: Callable[[Any, Spinner], Any], show: Callable[[Console, Any], None]
) -> None:
    """Run `measure(options, doing)`, write its result to `options.out`, and show it."""
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        from wholebatch.cli.error_messages import short_warnings

        with short_warnings():
            result = measure(options, doing)
        doing("drawing the page")
        shown = partial(show, doing.console, result)
        write_result(result, options.out, doing.console, shown, as_json=options.as_json)


def write_result(
    result: Result, out: Path, console: Console, show: Callable[[], None], *, as_json: bool
) -> None:
    """Write the results with their page, then print them, as JSON or by `show()`, and where."""
    from wholebatch.cli.report.html_report import write_report

    written = [("results:", out)]
    try:
        result.write(out)
        with suppress(MissingExtraError):  # without the package that draws it
            written.append(("page:   ", write_report([out], out.with_suffix(".html"))))
    except OptionError:  # the disk has become full: what was measured is not lost
        show()
        raise
    if as_json:
        print(out.read_text(encoding="utf-8"), end="")
        return
    show()
    for what, path in written:
        say(console, f"{what} {path_from_here(path)}")
