"""The commands of `wholebatch`, and one clear line for every user error."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from wholebatch import __version__
from wholebatch.cli.command_options import Command
from wholebatch.cli.recipe_files import EMBEDDED
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
        if arguments[0] == "--print-completion":
            print(_completion(arguments[1] if len(arguments) > 1 else ""))
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
            "wholebatch --print-completion bash|zsh|fish prints a completion script.",
        ]
    )


def _completion(shell: str) -> str:
    """Return the script that completes commands and options in a shell."""
    try:
        import shtab

        from wholebatch.lint import RULES
    except ImportError:
        from wholebatch.errors import MissingExtraError

        raise MissingExtraError("shtab", "cli", "--print-completion") from None
    if shell not in shtab.SUPPORTED_SHELLS:
        allowed = ", ".join(shtab.SUPPORTED_SHELLS)
        raise OptionError(f"--print-completion {shell}: must be one of {allowed}")
    parser = argparse.ArgumentParser(prog="wholebatch")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = load(name)
        assert isinstance(command, Command)
        own = command.parser()
        for action in own._actions:
            _add_values(action, shtab, [rule.code for rule in RULES])
        commands.add_parser(name, help=about, parents=[own], add_help=False)
    script: str = shtab.complete(parser, shell)
    # Where nothing else is known, bash completes files.
    return script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F")


def _add_values(action: argparse.Action, shtab: Any, codes: list[str]) -> None:
    """Tell shtab the values of an option: the names of its metavar, recipes, rules, or files."""
    shown = str(action.metavar or "")
    if re.fullmatch(r"[\w-]+(\|[\w-]+)+", shown):
        action.choices = [name for name in shown.split("|") if name.islower()]
    elif shown.startswith(("RECIPE", "NAME")) and not action.option_strings:
        action.choices = [*EMBEDDED]
    elif shown.startswith("CODE"):
        action.choices = codes
    elif shown.startswith(("DIR", "FILE", "RUN", "PATH", "SCRIPT")):
        action.complete = shtab.DIRECTORY if shown == "DIR" else shtab.FILE  # type: ignore[attr-defined]


def fail(message: str, status: int) -> int:
    """Print one message on stderr, and return the exit status."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return status
