"""`wholebatch verify`: the proof on a recipe, on your own training loop, or on a script.

A loop comes out of a file, with the file's own `model()`, `loss(model, micro)` and `data()` where
it has them (docs/verify.md, "Its model and data").
"""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from wholebatch.cli.recipe_files import EMBEDDED
from wholebatch.cli.report.terminal_output import Spinner, console_of, say
from wholebatch.cli.run_settings import autocast_option, like_train, resolve
from wholebatch.cli.split_proof import numbers, prove_splits
from wholebatch.errors import OptionError, RecipeError

if TYPE_CHECKING:
    import torch

    from wholebatch.verification import Case, LoopVerdict, Verdict

_BATCH, _LOOP = "Batch", "A function or script of your own"
_NOT_JUDGED = 3
_KINDS = {"model": "a recipe", "loop": "FILE.py:FUNCTION", "script": "a script, SCRIPT.py"}
_BUILT_IN = (
    'each micro-batch is a dict with "x" (inputs) and "y" (labels, -100 where none counts), and '
    "the model returns logits of x with the classes in the last dimension"
)
_like_recipes = partial(like_train, panel=_BATCH, of="model")
_loop, _script = (partial(option, panel=_LOOP, of=kind) for kind in ("loop", "script"))


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `wholebatch verify`; those of a recipe do not go with a function."""

    what: list[str] | None = argument(
        None,
        "WHAT",
        "A recipe (a Python file that defines model(), data() and loss(model, micro), or an "
        "embedded one: bytes-gpt, the default, or digits-cnn); FILE.py:FUNCTION, a function(model, "
        "optimizer, micro_batches) that trains one window; or SCRIPT.py, a training script. If "
        f"FILE.py has no model(), {_BUILT_IN}. The word model, loop or script before it decides.",
    )
    batch_size: int | None = _like_recipes("batch_size", "Samples per update.")
    micro_batch: str | None = _like_recipes(
        "micro_batch",
        "Size of a micro-batch. Default: the recipe's, else about four uneven parts.",
        metavar='N|"N tokens"',
    )
    precision: str | None = autocast_option(_BATCH, of="model")
    clip_norm: float | None = _like_recipes("clip_norm", "Clip to this norm.")
    batchnorm: str = _like_recipes("batchnorm", "As WholeBatch(batchnorm=).", default="exact")
    seed: int = like_train("seed", "Seed of weights and data.", _BATCH, default=0)
    equal: bool = switch("Test a function only with micro-batches of equal size.", _LOOP, of="loop")
    splits: tuple[int, ...] | None = _loop(
        None,
        "N,N",
        "Prove instead that a function(micro_batch), of any trainer, makes the same update however "
        "its samples are cut: sizes of micro-batches, the first one all samples.",
        check=numbers,
        typed=str,
    )
    ranks: tuple[int, ...] | None = _loop(
        None,
        "N,N",
        "With --splits: numbers of ranks, each of them a job of so many processes.",
        check=numbers,
        typed=str,
    )
    windows: int | None = _script(
        None,
        "N",
        "Windows of a script to watch. Default: to the end of its first epoch, or 8 windows if it "
        "has no DataLoader. 0 lets the script run to its end.",
        check=whole_number(0),
    )
    arguments: tuple[str, ...] = _script(
        (), "...", "Arguments of the script: all that follow.", flag="--", takes_rest=True
    )
    as_json: bool = switch(
        "Print JSON and nothing else; what a script prints goes to stderr.", "Output", flag="--json"
    )


@command(
    VerifyOptions,
    "wholebatch verify my_recipe.py",
    "wholebatch verify my_recipe.py --micro-batch 8 --precision bf16",
    "wholebatch verify train.py:one_window",
    "wholebatch verify train.py -- --lr 3e-4",
    "wholebatch verify script train.py",
    "wholebatch verify train.py:one_update --splits 8,4,1 --ranks 1,2",
)
def verify(options: VerifyOptions) -> int:
    """Prove that a model or a loop makes the update of the whole batch.

    If it does not, the causes are named. Exit status: 0 the same update, 1 another update, 2 wrong
    usage, 3 it could not be judged.
    """
    kind, name = _target_of(options.what or [])
    _check_partners(options, kind)
    if options.splits is not None:
        path, function = _parsed(str(name))
        ranks = options.ranks or (1,)
        return prove_splits(path, function, options.splits, ranks, as_json=options.as_json)
    if kind == "script":
        return _watch_script(Path(str(name)), options)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        with _shown_parts(doing):
            return _verify(options, kind, name, doing)


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


def _target_of(words: list[str]) -> tuple[str, str | None]:
    """Return the kind and the name of `[model|loop|script] WHAT`; else the file tells the kind."""
    word, rest = (words[0] if words else None), words[1:]
    if word not in _KINDS and not rest:
        return _kind_of(word), word
    if word not in _KINDS or len(rest) > 1 or not (rest or word == "model"):
        raise OptionError(
            f"{' '.join(words)}: give one target, after one of the words {', '.join(_KINDS)}"
        )
    name = rest[0] if rest else None
    if word == "script" and not Path(str(name)).is_file():
        raise OptionError(f"{name}: there is no such file")
    return str(word), name


def _kind_of(name: str | None) -> str:
    """Return the kind of a target.

    A file that defines model(), data() and loss(), and has no part to be run, is a recipe.
    """
    if name is None or name.startswith("hf:"):
        return "model"
    if ".py:" in name:
        return "loop"
    path = Path(name)
    if path.suffix != ".py":
        return "model"
    if not path.is_file():
        known = ", ".join(EMBEDDED)
        raise OptionError(f"{name}: there is no such file; the embedded recipes are: {known}")
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise RecipeError(f"{name}:{error.lineno}: {error.msg}") from None
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    is_run = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in body)
    return "model" if {"model", "data", "loss"} <= defined and not is_run else "script"


def _verify(options: VerifyOptions, kind: str, name: str | None, doing: Spinner) -> int:
    import torch

    from wholebatch.cli.parallel_ranks import process_group

    verdict: Verdict | LoopVerdict
    with process_group() as (rank, where):
        doing(f"comparing {name or 'bytes-gpt'} with the undivided batch")
        about: dict[str, Any] = {}
        if kind == "model":
            verdict, about = _verify_recipe(name, options, where=where, rank=rank)
        else:
            verdict = _verify_loop(str(name), options, where)
        doing.stop()
        if rank == 0:
            _show(verdict, options, about)
            sys.stdout.flush()
        if torch.distributed.is_initialized():
            # torchrun ends all ranks once one exits with 1: not before the first has printed.
            torch.distributed.barrier()
    return verdict.exit_status


def _check_partners(options: VerifyOptions, kind: str) -> None:
    """Refuse an option that belongs to another kind of what is verified."""
    for setting in fields(options):
        of = setting.metadata.get("of", kind)
        if of != kind and getattr(options, setting.name) != setting.default:
            raise OptionError(f"{flag_of(setting)}: belongs to {_KINDS[of]}, not to {_KINDS[kind]}")

    if options.splits is None and options.ranks is not None:
        raise OptionError("--ranks: belongs to --splits; give --splits 8,4,1 too")


def _verify_recipe(
    name: str | None, options: VerifyOptions, *, where: torch.device, rank: int
) -> tuple[Verdict, dict[str, Any]]:
    """Return the proof on the first batch of a recipe, and what `report` knows its runs by."""
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.training_run import fitted_to, micro_batch_of
    from wholebatch.verification import verify as prove

    recipe = load_recipe(name)
    names = ("batch_size", "micro_batch", "precision", "clip_norm", "seed")
    typed = {name: getattr(options, name) for name in names}
    config = resolve(typed, recipe.defaults, stored=None)
    model, optimizer = recipe.build(config, where)
    batches = recipe.build_batches(config.batch_size, seed=config.seed + rank)
    if options.batch_size is not None:
        config = fitted_to(config, batches)
    about = {
        "recipe": recipe.known_as,
        "recipe_sha256": recipe.digest,
        "batchnorm": options.batchnorm,
        "precision": config.precision,
    }
    verdict = prove(
        model,
        recipe.loss,
        batches.peek(),
        micro_batch=micro_batch_of(recipe, config),
        optimizer=optimizer,
        precision=config.autocast,  # type: ignore[arg-type]
        clip_norm=config.clip_norm,
        units=recipe.units,
        batchnorm=options.batchnorm,  # type: ignore[arg-type]
    )
    return verdict, about


# ------------------------------------------------------------------------- a script that trains


def _watch_script(script: Path, options: VerifyOptions) -> int:
    """Run a training script, and show the verdict on its first epoch.

    Status 3 if the script itself fails, unless a mistake was found before. On several ranks, only
    the first one reports: torchrun ends all ranks when one exits with a status other than 0.
    """
    from wholebatch.cli.watched_script import output_to_stderr, run_script

    with output_to_stderr() if options.as_json else nullcontext():
        done = run_script(script, options.arguments, windows=options.windows)
    if done.interrupted:
        if done.verdict.judged:
            _show(done.verdict, options)
        raise KeyboardInterrupt
    status = done.verdict.exit_status
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first:
        _show(done.verdict, options)
        sys.stdout.flush()
    return _NOT_JUDGED if done.failed and status == 0 else status if is_first or done.failed else 0


# ------------------------------------------------------------------------- a loop out of a file


def _verify_loop(loop: str, options: VerifyOptions, device: torch.device) -> LoopVerdict:
    """Return the verdict on `FILE.py:function`."""
    from wholebatch.cli.recipes.recipe import run_file
    from wholebatch.verification import verify_loop

    path, name = _parsed(loop)
    module = run_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(
            f"{path} has no function {name}(model, optimizer, micro_batches), which trains one "
            "window"
        )
    return verify_loop(
        function,
        case=_case_of(module, path, options.seed),
        steps=int(getattr(module, "steps", 4)),
        optimizer=getattr(module, "optimizer", None),
        uneven=not options.equal,
        device=device,
        name=f"{path.name}:{name}",
    )


def _parsed(loop: str) -> tuple[Path, str]:
    file, _, name = loop.rpartition(":")
    if not file or not name.isidentifier():
        raise OptionError(f"{loop}: must be FILE.py:FUNCTION, such as train.py:one_window")
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"{loop}: there is no file {file}")
    return path.resolve(), name


def _case_of(module: ModuleType, path: Path, seed: int) -> Case | None:
    """Return the model and data of a file that is a recipe too; None for all built-in ones."""
    import torch

    from wholebatch.batch import split
    from wholebatch.cli.recipes.recipe import recipe_of
    from wholebatch.verification import Case
    from wholebatch.verification.example_models import thinned

    if not any(hasattr(module, name) for name in ("model", "loss", "data")):
        return None
    recipe = recipe_of(module, path)

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        return recipe.build_model()

    def window(steps: int, even: bool, rank: int) -> list[Any]:
        size = int(getattr(module, "micro_batch", 4))
        batch = recipe.build_batches(size * steps, seed=seed + rank).peek()
        return split(batch, size) if even else thinned(split(batch, size))

    return Case(path.stem, build, recipe.loss, window)


# ------------------------------------------------------------------------------- on the screen


def _show(
    verdict: Verdict | LoopVerdict, options: VerifyOptions, about: dict[str, Any] | None = None
) -> None:
    """Print a verdict as it is written (`str(verdict)`), with a colour for each kind of line."""
    if options.as_json:
        print(json.dumps({**verdict.to_dict(), **(about or {})}, indent=2))
        return
    console = Console(file=sys.stdout, highlight=False)
    is_green = verdict.same and verdict.line.startswith("same update")  # else an error ended it
    colour = "green" if is_green else "red" if verdict.exit_status == 1 else "yellow"
    starts = {"note: ": "yellow", "instead: ": "green"}
    for number, line in enumerate(str(verdict).splitlines()):
        style = next((style_of for start, style_of in starts.items() if line.startswith(start)), "")
        style = f"bold {colour}" if number == 0 else style
        say(console, Text(line, style))
