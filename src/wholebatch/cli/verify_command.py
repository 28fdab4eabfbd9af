"""`wholebatch verify`: the proof on a recipe, on your own training loop, or on a script.

A loop comes out of a file, with the file's own `model()`, `loss(model, micro)` and `data()` where
it has them (docs/verify.md, "Its model and data").
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from wholebatch.cli.command_options import (
    argument,
    command,
    flag_of,
    option,
    switch,
    whole_number,
)
from wholebatch.cli.recipes.recipe_files import EMBEDDED
from wholebatch.cli.report.terminal_output import Spinner, console_of
from wholebatch.cli.run_settings import AUTOCAST, like_train, precision_of, resolve
from wholebatch.errors import OptionError, RecipeError, WholebatchError

if TYPE_CHECKING:
    import torch

    from wholebatch.verification import Case, LoopVerdict, Verdict

_BATCH, _LOOP = "Batch", "A function or script of your own"
_NOT_JUDGED = 3
_BUILT_IN = (
    'each micro-batch is a dict with "x" (inputs) and "y" (labels, -100 where none counts), and '
    "the model returns logits of x with the classes in the last dimension"
)
_like_train = partial(like_train, panel=_BATCH)
_like_recipes = partial(_like_train, of_recipes=True)
_loop = partial(option, panel=_LOOP)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `wholebatch verify`; those of a recipe do not go with a function."""

    what: str | None = argument(
        None,
        "WHAT",
        "A recipe (a Python file with model(), data() and loss(model, micro), or an embedded one: "
        "bytes-gpt, the default, or digits-cnn); FILE.py:FUNCTION, a function(model, optimizer, "
        "micro_batches) that trains one window; or SCRIPT.py, a training script. If FILE.py has no "
        f"model(), {_BUILT_IN}.",
    )
    batch_size: int | None = _like_recipes("batch_size", "Samples per update.", metavar="N")
    micro_batch: str | None = _like_recipes(
        "micro_batch",
        "Size of a micro-batch. Default: the recipe's, else about four uneven parts.",
        metavar='N|"N tokens"',
    )
    precision: str | None = option(
        None,
        "|".join(AUTOCAST),
        "Precision of the computation.",
        _BATCH,
        check=precision_of(*AUTOCAST),
        of_recipes=True,
    )
    clip_norm: float | None = _like_recipes("clip_norm", "Clip to this norm.")
    batchnorm: str = _like_recipes("batchnorm", "As WholeBatch(batchnorm=).", default="exact")
    execute: str | None = _like_recipes("execute", "As WholeBatch(execute=).")
    optimizer_state: str | None = _like_recipes(
        "optimizer_state", "As WholeBatch(memory=wb.Memory(optimizer_state=))."
    )
    float64: bool = option(
        True, None, "Do not repeat the proof in float64.", _BATCH, of_recipes=True
    )
    model: str = _loop(
        "all", "mlp|lm|all", "Built-in models for a function, if FILE.py has no model()."
    )
    steps: int | None = _loop(
        None,
        "N",
        "Micro-batches in a full window of a function. Default: steps in FILE.py, else 4.",
    )
    equal: bool = switch("Test a function only with micro-batches of equal size.", _LOOP)
    windows: int | None = _loop(
        None,
        "N",
        "Windows of a script to watch. Default: to the end of its first epoch, or 8 windows if it "
        "has no DataLoader. 0 lets the script run to its end.",
        check=whole_number(0),
    )
    arguments: tuple[str, ...] = _loop(
        (), "...", "Arguments of the script: all that follow.", flag="--", takes_rest=True
    )
    ddp: bool = switch("Under torchrun: wrap the model in DistributedDataParallel.", _LOOP)
    seed: int = _like_train("seed", "Seed of weights and data.", default=0)
    device: str = option("auto", "auto|cpu|cuda", "Device.", _BATCH)
    as_json: bool = switch("Print JSON.", "Output", flag="--json")


@command(
    VerifyOptions,
    "wholebatch verify my_recipe.py",
    "wholebatch verify my_recipe.py --micro-batch 8 --precision bf16",
    "wholebatch verify train.py:one_window",
    "wholebatch verify train.py -- --lr 3e-4",
)
def verify(options: VerifyOptions) -> int:
    """Prove that a model or a loop makes the update of the whole batch.

    If it does not, the causes are named. Exit status: 0 the same update, 1 another update, 2 wrong
    usage, 3 it could not be judged.
    """
    kind = _kind_of(options.what)
    _check_partners(options, kind)
    if kind == "script":
        return _watch_script(Path(str(options.what)), options)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        with _shown_parts(doing):
            return _verify(options, kind, doing)


@contextmanager
def _shown_parts(doing: Spinner) -> Iterator[None]:
    """Show which part of a proof runs: in the spinner, or as lines of a log."""

    class Parts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if doing.console.is_terminal:
                doing(record.getMessage())
            elif not doing.console.quiet:
                print(record.getMessage(), file=sys.stderr, flush=True)

    log, handler = logging.getLogger("wholebatch.verify"), Parts()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


def _kind_of(what: str | None) -> str:
    """Return the kind of the target: a recipe, a function or a script.

    A Python file is a recipe if it has `model()` and `loss()`, and a script otherwise.
    """
    if what is None or what.startswith("hf:"):
        return "recipe"
    if ".py:" in what:
        return "function"
    path = Path(what)
    if path.suffix != ".py":
        return "recipe"
    if not path.is_file():
        known = ", ".join(EMBEDDED)
        raise OptionError(f"{what}: there is no such file; the embedded recipes are: {known}")
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise RecipeError(f"{what}:{error.lineno}: {error.msg}") from None
    names = {one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    names |= {
        alias.asname or alias.name
        for one in body
        for alias in getattr(one, "names", ())
        if isinstance(one, ast.ImportFrom)
    }
    return "recipe" if {"model", "loss"} <= names else "script"


def _verify(options: VerifyOptions, kind: str, doing: Spinner) -> int:
    import torch

    from wholebatch.cli.parallel_ranks import process_group

    verdict: Verdict | LoopVerdict
    with process_group(options.device) as (rank, where):
        doing(f"comparing {options.what or 'bytes-gpt'} with the undivided batch")
        if kind == "recipe":
            verdict = _verify_recipe(options, where=where, rank=rank)
        else:
            verdict = _verify_loop(str(options.what), options, where)
        doing.stop()
        if rank == 0:
            _show(verdict, as_json=options.as_json)
            sys.stdout.flush()
        if torch.distributed.is_initialized():
            # torchrun ends all ranks once one exits with 1: not before the first has printed.
            torch.distributed.barrier()
    return verdict.exit_status


def _check_partners(options: VerifyOptions, kind: str) -> None:
    """Refuse an option that belongs to another kind of what is verified."""
    if kind != "function" and (
        options.steps is not None or options.equal or options.model != "all"
    ):
        raise OptionError("--steps, --equal and --model belong to FILE.py:FUNCTION")
    if kind != "script" and (options.windows is not None or options.arguments):
        raise OptionError("--windows and arguments after -- belong to a script, SCRIPT.py")
    for one in fields(options):
        is_given = getattr(options, one.name) != one.default
        if kind != "recipe" and is_given and one.metadata.get("of_recipes"):
            raise OptionError(
                f"{flag_of(one)}: belongs to a recipe; {options.what} has its own way to train"
            )
    if options.ddp and "WORLD_SIZE" not in os.environ:
        raise OptionError("--ddp: belongs to torchrun; this is one process")


def _verify_recipe(options: VerifyOptions, *, where: torch.device, rank: int) -> Verdict:
    """Return the proof on the first batch of a recipe, with its own optimizer."""
    import torch

    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.training_run import fitted_to, micro_batch_of
    from wholebatch.verification import verify as prove

    recipe = load_recipe(options.what)
    names = ("batch_size", "micro_batch", "precision", "clip_norm", "seed")
    given = {name: getattr(options, name) for name in names}
    config = resolve(given, recipe.defaults, stored=None)
    model, optimizer = recipe.build(config, where)
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
    return prove(
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


# ------------------------------------------------------------------------- a script that trains


def _watch_script(script: Path, options: VerifyOptions) -> int:
    """Run a training script as it is, and show the verdict on its first epoch.

    Status 3 if the script itself fails, unless a mistake was found before. On several ranks, only
    the first one reports: torchrun ends all ranks when one exits with a status other than 0.
    """
    import runpy

    from wholebatch.verification.watch_loop import Watch, WatchIsOver

    watched = Watch(name=script.name, windows=options.windows, logs=False)
    before, failed = (sys.argv, sys.path[:]), False
    sys.argv, sys.path[0] = [str(script), *options.arguments], str(script.resolve().parent)
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
            _show(watched.verdict, as_json=options.as_json)
        raise
    except Exception as error:
        failed = True
        _show_traceback(error, script)
    finally:
        sys.argv, sys.path[:] = before
    status = watched.verdict.exit_status
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first:
        _show(watched.verdict, as_json=options.as_json)
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
        has = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and key[0] != "_"
        ]
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
        given = "" if hasattr(module, "model") else f". {path.name} has no model(): {_BUILT_IN}"
        raise RecipeError(f"{place}: {type(error).__name__}: {line}{given}") from error


def _parsed(loop: str) -> tuple[Path, str]:
    file, _, name = loop.rpartition(":")
    if not file or not name.isidentifier():
        raise OptionError(f"{loop}: must be FILE.py:FUNCTION, such as train.py:one_window")
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"{loop}: there is no file {file}")
    return path.resolve(), name


def _cases(module: ModuleType, path: Path, model: str, seed: int) -> list[Case] | None:
    """Return the model and data of a file that is a recipe too; None for all built-in ones."""
    import torch

    from wholebatch.batch import split
    from wholebatch.cli.recipes.recipe import recipe_of
    from wholebatch.verification import ZOO, Case
    from wholebatch.verification.example_models import thinned

    if not any(hasattr(module, name) for name in ("model", "loss", "data")):
        if model != "all" and model not in ZOO:
            raise OptionError(f"--model {model}: must be one of {', '.join(ZOO)} or all")
        return None if model == "all" else [ZOO[model]]
    if model != "all":
        raise OptionError(f"--model {model}: {path.name} has a model of its own")
    recipe = recipe_of(module, path)

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        return recipe.build_model()

    def window(steps: int, even: bool, rank: int) -> list[Any]:
        size = int(getattr(module, "micro_batch", 4))
        batch = recipe.build_batches(size * steps, seed=seed + rank).peek()
        return split(batch, size) if even else thinned(split(batch, size))

    return [Case(path.stem, build, recipe.loss, window)]


# ------------------------------------------------------------------------------- on the screen


def _show(verdict: Verdict | LoopVerdict, *, as_json: bool) -> None:
    """Print a verdict as it is written (`str(verdict)`), with a colour for each kind of line."""
    if as_json:
        print(verdict.to_json())
        return
    console = Console(file=sys.stdout, highlight=False)
    is_green = verdict.same and verdict.line.startswith("same update")  # else an error ended it
    colour = "green" if is_green else "red" if verdict.exit_status == 1 else "yellow"
    starts = {"note: ": "yellow", "instead: ": "green", "cause: ": "red"}
    for number, line in enumerate(str(verdict).splitlines()):
        style = next((one for start, one in starts.items() if line.startswith(start)), "")
        style = f"bold {colour}" if number == 0 else style
        console.print(Text(line, style))
