"""Errors and warnings of a run: short, with the recipe's own line and how to go on."""

from __future__ import annotations

import errno
import linecache
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from wholebatch import errors
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.recipes.recipe import place_of
from wholebatch.cli.run_folder import RunFolder, resume_command
from wholebatch.cli.training_run import Session
from wholebatch.window.forward_state import replaced_attributes


def short_warnings(*, shown: bool = True) -> AbstractContextManager[None]:
    """Print one line for each warning: some of torch's bring sixty lines of C++ frames along."""

    def first_line(
        message: Warning | str, category: type[Warning], *_: object, **__: object
    ) -> str:
        if not shown:  # the first of several ranks has told it
            return ""
        return f"warning: {str(message).strip().splitlines()[0]} ({category.__name__})\n"

    return replaced_attributes(warnings, formatwarning=first_line)


@contextmanager
def training_failures(session: Session, folder: Path) -> Iterator[None]:
    """Tell an error of the recipe by its file and line; one of wholebatch itself stays whole."""
    recipe, world = session.recipe.path, session.world
    who = f"rank {world.rank}: " if world.ranks > 1 else ""
    try:
        yield
    except errors.RankError as error:  # the rank that failed says what and where
        print(f"error: {_one_line(error)}", file=sys.stderr)
        if world.is_first:
            _tell_last(folder, world)
        raise SystemExit(1) from error
    except (errors.WholebatchError, torch.OutOfMemoryError) as error:
        print(f"error: {who}{_one_line(error)}", file=sys.stderr)
        if isinstance(error, torch.OutOfMemoryError):
            print("  give a smaller --micro-batch", file=sys.stderr)
        elif place := place_of(error, recipe):
            print(f"  at {place}", file=sys.stderr)
        _tell_last(folder, world)
        raise SystemExit(1 if _is_of_the_work(error) else 2) from error
    except Exception as error:
        if place_of(error, recipe) is not None:
            print(f"error: {who}{_one_line(error)}", file=sys.stderr)
            _tell_lines(error, recipe)
            if session.config.precision == "bf16-pure" and "BFloat16" in str(error):
                print(f"  --precision {_PURE}", file=sys.stderr)
        elif isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            print(f"error: {who}cannot write to {folder}: {error.strerror}", file=sys.stderr)
        else:
            raise
        _tell_last(folder, world)
        raise SystemExit(1) from error


def _tell_lines(error: Exception, recipe: Path) -> None:
    """Print every line of the recipe that the error passed through."""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == recipe and frame.lineno is not None:
            line = linecache.getline(frame.filename, frame.lineno).strip()
            print(f"  at {recipe}:{frame.lineno}, in {frame.name}\n    {line}", file=sys.stderr)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
_PURE = "bf16-pure: inputs must be bfloat16, too: x.bfloat16() in the recipe; or --precision bf16"
_WHILE_TRAINING = (ArithmeticError, errors.WindowError, torch.OutOfMemoryError)


def _is_of_the_work(error: BaseException) -> bool:
    """True for a failure during the work (exit status 1), not a refusal before it (2)."""
    if isinstance(error, errors.StateError):  # a checkpoint could not be written, or is not fit
        return isinstance(error.__cause__, OSError | RuntimeError)
    return isinstance(error, _WHILE_TRAINING)


# Advice that the command has no option for.
_OF_THE_LIBRARY = re.compile(r"[;,] (or )?pass (nonfinite|zero_units)='skip'[^.;]*")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, errors.NonFiniteError | errors.EmptyWindowError):
        return _OF_THE_LIBRARY.sub("", text)
    if isinstance(error, errors.WholebatchError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tell_last(folder: Path, world: World) -> None:
    run = RunFolder(folder)
    if run.config.is_file() and run.has_run() and Checkpoints(run.checkpoints).paths():
        again = resume_command(folder, parallel=world.parallel)
        print(f"  continue from the last checkpoint: {again}", file=sys.stderr)
