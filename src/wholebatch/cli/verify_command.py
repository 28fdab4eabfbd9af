"""`wholebatch verify`: the proof on a recipe, on someone's own training loop, or on their script.

A loop comes out of a file, with the file's own `model()`, `loss(model, micro)` and `data()` where
it has them (docs/verify.md, "Its model and data").
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from wholebatch.cli.command_options import (
    command,
    flag_of,
    option,
    recipe_argument,
    switch,
    whole_number,
)
from wholebatch.cli.recipe_measuring import made
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    fitting,
    panel,
    plain_table,
    say,
)
from wholebatch.cli.run_settings import like_train, resolve
from wholebatch.errors import OptionError, RecipeError, WholebatchError

if TYPE_CHECKING:
    import torch

    from wholebatch.verification import Case, LoopTrial, LoopVerdict, Verdict
    from wholebatch.verification.run_comparison import Comparison

_BATCH, _LOOP = "Batch", "Your own loop"
_NOT_JUDGED = 3
_like_train = partial(like_train, panel=_BATCH)
_like_recipes = partial(_like_train, of_recipes=True)
_loop = partial(option, panel=_LOOP)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `wholebatch verify`; those of a recipe do not go with `--loop`."""

    recipe: str | None = recipe_argument(
        "A Python file with model(), data() and loss(model, micro), or an embedded recipe: "
        "bytes-gpt (the default) or digits-cnn."
    )
    batch_size: int | None = _like_recipes("batch_size", "Samples per update.", metavar="N")
    micro_batch: str | None = _like_recipes(
        "micro_batch",
        "Size of a micro-batch. Default: the recipe's, else about four uneven parts.",
        metavar='N|"N tokens"',
    )
    precision: str | None = _like_recipes(
        "precision", "Precision of the computation.", metavar="full|bf16|fp16|fp8"
    )
    clip_norm: float | None = _like_train(
        "clip_norm",
        "Clip to this norm. With --loop: the norm that a loop clips to by hand "
        "(clip_grad_norm_ is detected).",
    )
    batchnorm: str = _like_recipes("batchnorm", "As WholeBatch(batchnorm=).", default="exact")
    execute: str | None = _like_recipes("execute", "As WholeBatch(execute=).")
    optimizer_state: str | None = _like_recipes(
        "optimizer_state", "As WholeBatch(memory=wb.Memory(optimizer_state=))."
    )
    float64: bool = option(
        True, None, "Do not repeat the proof in float64.", _BATCH, of_recipes=True
    )
    loop: str | None = _loop(
        None,
        "FILE.py:FUNCTION",
        "Check your own loop: a function(model, optimizer, micro_batches) that trains one window.",
    )
    model: str = _loop(
        "all", "mlp|lm|cnn|all", "Built-in models for the loop, if FILE.py has no model()."
    )
    steps: int | None = _loop(
        None, "N", "Micro-batches in a full window of the loop. Default: steps in FILE.py, else 4."
    )
    equal: bool = switch("Test only micro-batches of equal size.", _LOOP)
    trainer: tuple[str, ...] | None = _loop(
        None,
        "SCRIPT.py [ARGUMENTS]",
        "Run your training script, watch its first window, show the verdict and stop. Everything "
        "after this option belongs to the script.",
        takes_rest=True,
    )
    windows: int = _loop(
        1,
        "N",
        "Windows to watch; give it before --trainer. 0 lets the script run to its end.",
        check=whole_number(0),
    )
    ddp: bool = switch("Under torchrun: wrap the model in DistributedDataParallel.", _LOOP)
    seed: int = _like_train("seed", "Seed of weights and data.", default=0)
    device: str = option("auto", "auto|cpu|cuda", "Device.", _BATCH)
    as_json: bool = switch("Print JSON.", "Output", flag="--json")


@command(
    VerifyOptions,
    "wholebatch verify my_recipe.py",
    "wholebatch verify my_recipe.py --micro-batch 8 --precision bf16",
    "wholebatch verify --loop train.py:one_window",
    "wholebatch verify --trainer train.py --lr 3e-4",
)
def verify(options: VerifyOptions) -> int:
    """Prove that a model or a loop makes the update of the whole batch.

    If it does not, the causes are named. Exit status: 0 the same update, 1 another update, 2 wrong
    usage, 3 it could not be judged.
    """
    _check_partners(options)
    if options.trainer is not None:
        return _watch_script(options.trainer, options)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        return _verify(options, doing)


def _verify(options: VerifyOptions, doing: Spinner) -> int:
    import torch

    from wholebatch.cli.parallel_ranks import process_group

    verdict: Verdict | LoopVerdict
    with process_group(options.device) as (rank, where):
        doing(f"comparing {options.loop or options.recipe or 'bytes-gpt'} with the undivided batch")
        if options.loop is None:
            title, verdict = _verify_recipe(options, where=where, rank=rank)
        else:
            title, verdict = options.loop, _verify_loop(options.loop, options, where)
        doing.stop()
        if rank == 0:
            _show(title, verdict, as_json=options.as_json)
            sys.stdout.flush()
        if torch.distributed.is_initialized():
            # torchrun ends all ranks once one exits with 1: not before the first has printed.
            torch.distributed.barrier()
    return verdict.exit_status


def _check_partners(options: VerifyOptions) -> None:
    """Refuse an option of a recipe beside a loop, and the other way round."""
    loop = options.loop
    if options.trainer is not None and (loop is not None or options.recipe is not None):
        raise OptionError("--trainer: stands alone; a script brings its own model, data and loop")
    if options.trainer is None and options.windows != 1:
        raise OptionError("--windows: belongs to --trainer SCRIPT.py, and stands before it")
    if loop is not None and options.recipe is not None:
        raise OptionError("RECIPE and --loop together: a loop's FILE.py brings its own model")
    if loop is None and (options.steps is not None or options.equal or options.model != "all"):
        raise OptionError("--steps, --equal and --model belong to --loop FILE.py:FUNCTION")
    for one in fields(options):
        is_given = getattr(options, one.name) != one.default
        if loop is not None and is_given and one.metadata.get("of_recipes"):
            raise OptionError(
                f"{flag_of(one)}: belongs to a RECIPE; a --loop has its own way to train"
            )
    if options.ddp and "WORLD_SIZE" not in os.environ:
        raise OptionError("--ddp: belongs to torchrun; this is one process")


def _verify_recipe(
    options: VerifyOptions, *, where: torch.device, rank: int
) -> tuple[str, Verdict]:
    """Return the title and the proof on the first batch of a recipe, with its own optimizer."""
    import torch

    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.training_run import fitted_to, micro_batch_of
    from wholebatch.verification import verify as prove

    recipe = load_recipe(options.recipe)
    names = ("batch_size", "micro_batch", "precision", "clip_norm", "seed")
    given = {name: getattr(options, name) for name in names}
    config = resolve(given, recipe.defaults, stored=None)
    model, optimizer = made(recipe, config, where)
    batches = recipe.build_batches(config.batch_size, seed=config.seed + rank)
    if options.batch_size is not None:
        config = fitted_to(config, batches)
    wrapped: torch.nn.Module = model
    if options.ddp and torch.distributed.is_initialized():
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    more: dict[str, Any] = {"batchnorm": options.batchnorm, "float64": options.float64}
    more |= {} if options.execute is None else {"execute": options.execute}
    if options.optimizer_state is not None:
        more["optimizer_state"] = options.optimizer_state
    verdict = prove(
        wrapped,
        recipe.loss,
        batches.peek(),
        micro_batch=micro_batch_of(recipe, config),
        optimizer=optimizer,
        precision=config.autocast,  # type: ignore[arg-type]
        clip_norm=config.clip_norm,
        units=recipe.units,
        **more,
    )
    about = f": {recipe.description}" if recipe.description else ""
    return f"{recipe.name}{about}", verdict


# ------------------------------------------------------------------------- a script that trains


def _watch_script(arguments: tuple[str, ...], options: VerifyOptions) -> int:
    """Run a training script as it is, and show the verdict on its first windows.

    Status 3 if the script itself fails, unless a mistake was found before. Of several ranks the
    first one tells: torchrun ends all ranks once one has another status than 0.
    """
    import runpy

    from wholebatch.verification.watch_loop import Watch, WatchIsOver

    script = Path(arguments[0])
    if not script.is_file():
        raise OptionError(f"--trainer {script}: there is no such file")
    watched = Watch(name=script.name, stop_after=options.windows, logs=False)
    before, failed = (sys.argv, sys.path[:]), False
    sys.argv, sys.path[0] = [str(script), *arguments[1:]], str(script.resolve().parent)
    try:
        with watched:
            runpy.run_path(os.path.abspath(script), run_name="__main__")
    except WatchIsOver:
        pass
    except SystemExit as ended:
        failed = bool(ended.code)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        if watched.verdict.judged:
            _show(script.name, watched.verdict, as_json=options.as_json)
        raise
    except Exception as error:
        failed = True
        _show_traceback(error, script)
    finally:
        sys.argv, sys.path[:] = before
    status = watched.verdict.exit_status
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first:
        _show(script.name, watched.verdict, as_json=options.as_json)
        sys.stdout.flush()
    return _NOT_JUDGED if failed and status == 0 else status if is_first or failed else 0


def _show_traceback(error: Exception, script: Path) -> None:
    """Print the traceback of a script as Python does, without the frames that ran it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != os.path.abspath(script):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


# ------------------------------------------------------------------------- a loop out of a file


def _verify_loop(loop: str, options: VerifyOptions, device: torch.device) -> LoopVerdict:
    """Return the verdict on `FILE.py:function`."""
    from wholebatch.cli.recipes.recipe import place_of, run_file
    from wholebatch.verification import verify_loop

    path, name = _parsed(loop)
    module = run_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        has = [n for n, value in vars(module).items() if callable(value) and n[:1] != "_"]
        raise RecipeError(
            f"{path} has no function {name}; it has {', '.join(has) or 'none'}. The function takes "
            "(model, optimizer, micro_batches) and trains one window"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise RecipeError(
            f"{path}: {name}() does not take (model, optimizer, micro_batches), which trains one "
            f"window: {error}"
        ) from None
    except ValueError:  # it has no signature that could be read: it is seen when it is called
        pass
    count = options.steps if options.steps is not None else int(getattr(module, "steps", 4))
    try:
        return verify_loop(
            function,
            case=_cases(module, path, options.model, options.seed),
            steps=count,
            optimizer=getattr(module, "optimizer", None),
            clip_norm=options.clip_norm,
            uneven=not options.equal,
            ddp=options.ddp,
            device=device,
            name=f"{path.name}:{name}",
        )
    except WholebatchError:
        raise
    except Exception as error:
        place = place_of(error, path)
        if place is None:
            raise
        line = (str(error).strip().splitlines() or [""])[0]
        raise RecipeError(f"{place}: {type(error).__name__}: {line}") from error


def _parsed(loop: str) -> tuple[Path, str]:
    file, _, name = loop.rpartition(":")
    if not file or not name.isidentifier():
        raise OptionError(f"--loop {loop}: must be FILE.py:FUNCTION, such as train.py:one_window")
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"--loop {loop}: there is no file {file}")
    return path.resolve(), name


def _cases(module: ModuleType, path: Path, model: str, seed: int) -> list[Case]:
    import torch

    from wholebatch.verification import ZOO, Case

    parts = ("model", "loss")
    there = [name for name in (*parts, "data", "micro_batches") if hasattr(module, name)]
    if not there:
        if model != "all" and model not in ZOO:
            raise OptionError(f"--model {model}: must be one of {', '.join(ZOO)} or all")
        return list(ZOO.values()) if model == "all" else [ZOO[model]]
    if model != "all":
        raise OptionError(f"--model {model}: {path.name} has a model of its own")
    missing = [f"{name}()" for name in parts if name not in there]
    if "data" not in there and "micro_batches" not in there:
        missing.append("data() or micro_batches()")
    if missing:
        has = ", ".join(f"{name}()" for name in there)
        raise RecipeError(
            f"{path} has {has} but no {' nor '.join(missing)}: "
            "give all of model(), loss(model, micro) and data(), or none for the built-in models"
        )

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        built = module.model()
        if not isinstance(built, torch.nn.Module):
            raise RecipeError(f"{path}: model() returned {type(built).__name__}, not an nn.Module")
        return built

    return [Case(path.stem, build, module.loss, _window(module, path, seed))]


def _window(module: ModuleType, path: Path, seed: int) -> Callable[[int, bool, int], list[Any]]:
    import torch

    from wholebatch.batch import split
    from wholebatch.cli.recipes.recipe_batches import Batches
    from wholebatch.verification.example_models import thinned

    def window(steps: int, even: bool, rank: int) -> list[Any]:
        torch.manual_seed(seed + rank)
        if hasattr(module, "micro_batches"):
            micros = list(module.micro_batches())
            if len(micros) < steps:
                raise RecipeError(
                    f"{path}: micro_batches() gave {len(micros)}, and a full window has {steps}; "
                    "give that many, or say --steps"
                )
            micros = micros[:steps]
        else:
            size = int(getattr(module, "micro_batch", 4))
            batches = Batches(
                module.data,
                batch_size=size * steps,
                seed=seed + rank,
                collate=getattr(module, "collate", None),
            )
            micros = split(batches.peek(), size)
        return micros if even else thinned(micros)

    return window


# ------------------------------------------------------------------------------- on the screen


def _show(title: str, verdict: Verdict | LoopVerdict, *, as_json: bool) -> None:
    from wholebatch.verification import Verdict

    if as_json:
        print(verdict.to_json())
        return
    console = Console(file=sys.stdout)
    if isinstance(verdict, Verdict):
        _show_verdict(console, title, verdict)
    else:
        _show_loop(console, verdict)


def _show_verdict(console: Console, title: str, verdict: Verdict) -> None:
    """Print the proof on one model and batch: the answer, the evidence, what to do."""
    from wholebatch.verification.run_comparison import listed

    size = f"{verdict.samples} samples in {verdict.micro_batches} micro-batches"
    if verdict.samples < verdict.of_samples:
        size += f" (the largest part of {verdict.of_samples} that fits undivided)"
    if verdict.ranks > 1:
        size += f", on each of {verdict.ranks} ranks"
    body: list[RenderableType] = [
        _answer(verdict.same),
        Text(f"{size} · {verdict.precision} · {verdict.device} · {verdict.seconds:.1f} s", "dim"),
        Text(),
        fitting(_distances(verdict), console.width - 4),
    ]
    console.print(panel(title, body, "green" if verdict.same else "red"))
    console.print(fitting(_worst(verdict.gradient, 4 if verdict.same else 8), console.width))
    if not verdict.same:
        for cause in verdict.causes:
            where = f" in {listed(cause.where)}" if cause.where else ""
            _block(console, f"{cause.kind}{where}", cause.evidence, "bold red")
            _block(console, "instead", cause.advice, "green")
    for note in verdict.notes:
        _block(console, "note", note, "yellow")


def _answer(same: bool, what: str = "") -> Text:
    if same:
        return Text("✓ the same update as the undivided batch", style="bold green")
    return Text(f"✗ not the update of the undivided batch{what}", style="bold red")


def _distances(verdict: Verdict) -> Table:
    from wholebatch.verification.run_comparison import percent as distance

    table = plain_table("", ">off by", ">rounding", "")
    for row in (verdict.gradient, verdict.update, verdict.float64):
        if row is None:
            continue
        mark = "[green]✓[/]" if row.same else "[red]✗[/]"
        table.add_row(row.what, distance(row.distance), distance(row.tolerance), mark)
    if verdict.to_float64 is not None and verdict.precision != "full":
        whole, ours = verdict.to_float64
        table.add_row("from float64: undivided", distance(whole), "", "")
        table.add_row("from float64: accumulated", distance(ours), distance(1.25 * whole), "")
    return table


def _worst(comparison: Comparison, number: int) -> Table:
    from wholebatch.verification.run_comparison import percent as distance

    table = plain_table(
        *("parameter", ">numbers", ">off by", ">rounding"),
        title="Largest gradient errors, relative to rounding",
    )
    for line in comparison.worst(number):
        cells = (f"{line.numbers:,}", distance(line.distance), distance(line.floor))
        table.add_row(escape(line.name), *cells, style="red" if line.differs else "dim")
    return table


def _show_loop(console: Console, verdict: LoopVerdict) -> None:
    """Print the verdict on someone's loop: every window it was given, and the evidence."""
    from wholebatch.verification.mistakes import MISTAKES

    mistake = verdict.mistake
    body: list[RenderableType] = [_answer(verdict.same, ", and no known mistake fits")]
    if not verdict.judged:
        body = [Text("? not judged", style="bold yellow")]
    if mistake is not None:
        does, instead = Text(mistake.does), Text(f"Instead: {mistake.instead}", "green")
        body = [_answer(False, f": {mistake.name}"), does, instead]
    ranks = f" · {verdict.ranks} ranks" if verdict.ranks > 1 else ""
    windows = [trial for trial in verdict.trials if trial.micro_batches]
    count = len(windows)
    about = (
        f"{count} window{'s' * (count != 1)} · {verdict.precision}{ranks} · {verdict.seconds:.1f} s"
    )
    body.append(Text(about, "dim"))
    colour = "green" if verdict.same else "red" if verdict.judged else "yellow"
    console.print(panel(verdict.loop, body, colour))
    if windows:
        console.print(fitting(_windows(verdict), console.width))
    wrong = next((trial for trial in verdict.trials if trial.differs), None)
    if wrong is not None:
        console.print()
        console.print(fitting(_evidence(wrong), console.width))
    for key in verdict.mistakes[1:]:
        also = MISTAKES[key]
        _block(console, f"also: {also.name}", f"{also.does}. Instead: {also.instead}", "red")
    for note in dict.fromkeys(note for trial in verdict.trials for note in trial.notes):
        _block(console, "note", note, "yellow")


def _windows(verdict: LoopVerdict) -> Table:
    from wholebatch.verification.mistakes import MISTAKES, NOT_JUDGED, RIGHT
    from wholebatch.verification.run_comparison import percent as distance

    table = plain_table("model", "window", ">steps", ">off by", "~found")
    words = {key: f"[red]✗ {mistake.name}[/]" for key, mistake in MISTAKES.items()}
    words |= {RIGHT: "[green]✓ right[/]", NOT_JUDGED: "[yellow]? not judged[/]"}
    before = ""
    for trial in verdict.trials:
        found = words[trial.found] if trial.found else "[red]✗ nothing known fits[/]"
        case = "" if trial.case == before else trial.case
        before = trial.case
        is_known = trial.optimizer_steps <= 1 and math.isfinite(trial.right.distance)
        off = distance(trial.right.distance) if is_known else "-"
        table.add_row(escape(case), trial.name, str(trial.optimizer_steps), off, found)
    return table


def _evidence(trial: LoopTrial) -> Table:
    from wholebatch.verification.mistakes import RIGHT
    from wholebatch.verification.run_comparison import percent as distance

    what = "gradients that the optimizer saw" if trial.observed_by == "gradients" else "update"
    table = plain_table(
        *("~hypothesis", ">distance", "", "~as"),
        title=f"Distance of the {what} from each hypothesis ({trial.case}: {trial.name})",
    )
    for fit in trial.fits[:9]:
        mark = "[green]fits[/]" if fit.fits else ""
        style = "bold" if fit.key == trial.found else "" if fit.key == RIGHT else "dim"
        off = distance(fit.distance) if math.isfinite(fit.distance) else "-"
        table.add_row(fit.name, off, mark, escape(fit.variant), style=style)
    table.add_row("(fits within)", distance(trial.tolerance), "", "", style="dim")
    return table


def _block(console: Console, head: str, text: str, style: str) -> None:
    say(console, head, style=style)
    say(console, text, indent=2)
