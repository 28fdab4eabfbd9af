"""The commands together, and one clear line for everything that a user can get wrong."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from wholebatch import __version__
from wholebatch.cli.bench_command import bench
from wholebatch.cli.cache_command import cache
from wholebatch.cli.lint_command import lint
from wholebatch.cli.plan_command import plan
from wholebatch.cli.recipes_command import recipes
from wholebatch.cli.report_command import report
from wholebatch.cli.scale_command import scale
from wholebatch.cli.stop_signal import STOPPED
from wholebatch.cli.train_command import train
from wholebatch.cli.tune_command import tune
from wholebatch.cli.verify_command import verify
from wholebatch.errors import WholebatchError

app = typer.Typer(
    name="wholebatch",
    help="Train on the whole batch in the memory of a slice: the same update.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a word when Ctrl-C ends it: the parser's package would say none."""

    @functools.wraps(command)
    def told(*given: Any, **options: Any) -> None:
        try:
            command(*given, **options)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(STOPPED) from None

    return told


for _command in (train, plan, tune, bench, scale, verify, lint, report, recipes, cache):
    app.command()(_told(_command))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"wholebatch {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str]) -> int:
    """Return the exit status of `wholebatch ARGUMENTS`; errors are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that has no "×" shows "?", and lives
            stream.reconfigure(errors="replace")
    empty = _empty_path(arguments)
    if empty is not None:
        return fail(f'{empty} "": is empty; give a path (a variable that is not set?)', 2)
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments, prog_name="wholebatch", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return STOPPED
    except WholebatchError as error:
        return fail(str(error), 2)
    except BrokenPipeError:  # `wholebatch recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Usage errors of the parser, wherever its package keeps them in this version.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        text = _not_a_number(error, arguments) or f"{format_message()} (see --help)"
        return fail(text, int(getattr(error, "exit_code", 2)))
    return result if isinstance(result, int) else 0


def _empty_path(arguments: list[str]) -> str | None:
    """Return the option whose path is empty: as a path that would be the folder one is in."""
    options = ("--out", "--from", "--output")
    for option, value in zip(arguments, [*arguments[1:], None], strict=False):
        if (option in options and value == "") or option in [f"{name}=" for name in options]:
            return option.rstrip("=")
    if arguments[:1] in (["lint"], ["report"]) and "" in arguments[1:2]:
        return arguments[0]
    return None


def _not_a_number(error: Exception, arguments: list[str]) -> str | None:
    """Return the message for an option that takes a number: the parser's own omits the value."""
    message = str(getattr(error, "message", ""))
    wanted = "a whole number" if "integer" in message else "a number"
    if wanted == "a number" and "number" not in message and "float" not in message:
        return None
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for place, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            if name == option:
                given = value if equals else next(iter(arguments[place + 1 :]), "")
                return f"{option} {given}: must be {wanted} (see --help)"
    return None


def fail(message: str, status: int) -> int:
    """Print one line on stderr, and return the exit status."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return status
