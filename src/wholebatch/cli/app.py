"""The commands of `wholebatch`, and one clear line for every user error."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from wholebatch import __version__
from wholebatch.cli.stop_signal import STOPPED
from wholebatch.errors import OptionError, WholebatchError

GROUPS = {
    "Train": {
        "train": "Train a recipe: every update is that of the whole batch.",
        "recipes": "List the embedded recipes, or print one to start your own from.",
        "report": "Write one HTML page that compares runs and measurements.",
    },
    "Check": {
        "verify": "Prove that a model or a loop makes the update of the whole batch.",
        "lint": "Find gradient accumulation mistakes in scripts and notebooks.",
    },
    "Plan and measure": {
        "plan": "Predict peak memory and recommend a micro-batch. Nothing is trained.",
        "tune": "Find the fastest settings for a batch here, or a learning rate.",
        "scale": "Work out batch, micro-batch, steps and ranks from each other.",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
"""Every command and its first line of help. A command's module is imported when it is called."""


def load(name: str) -> Callable[[Sequence[str]], int]:
    """Return the command of this name."""
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {close[0]}?" if close else "see wholebatch --help"
        raise OptionError(f"no such command: {name} ({meant})")
    command: Callable[[Sequence[str]], int] = getattr(
        import_module(f"wholebatch.cli.{name}_command"), name
    )
    return command


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of `wholebatch ARGUMENTS`; errors are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that has no "×" shows "?", and lives
            stream.reconfigure(errors="replace")
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_help())
            return 0
        if arguments[0] == "--version":
            print(f"wholebatch {__version__}")
            return 0
        return load(arguments[0])(arguments[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except WholebatchError as error:
        return fail(str(error), 2)
    except BrokenPipeError:  # `wholebatch recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        return ended.code
    except Exception as error:
        from wholebatch.cli.recipes.recipe import place_of

        files = filter(None, map(re.compile(r".+\.py").match, arguments))  # a recipe or a loop
        place = next(
            filter(None, (place_of(error, Path(names[0]).resolve()) for names in files)), None
        )
        judges = arguments[0] == "verify"  # there, status 1 is another update
        if place is None:
            if not judges or isinstance(error, ModuleNotFoundError):
                raise
            traceback.print_exception(error)
            return 3
        status = 3 if judges else 1
        return fail(f"{type(error).__name__}: {error}, at {place}", status)


def _help() -> str:
    lines = [
        "usage: wholebatch COMMAND [options]",
        "",
        "Gradient accumulation that makes the same update as the whole batch.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<9}{text}" for name, text in group.items())]
    return "\n".join(
        [
            *lines,
            "",
            "wholebatch COMMAND --help shows the options of a command.",
        ]
    )


def fail(message: str, status: int) -> int:
    """Print one message on stderr, and return the exit status."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return status
