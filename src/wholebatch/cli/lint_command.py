"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from wholebatch.cli.command_options import argument, command, option
from wholebatch.lint.command_line import LintArguments, run


@dataclass(frozen=True)
class LintOptions:
    """The options of `wholebatch lint`, which become those of the linter."""

    paths: list[str] | None = argument(
        None, "PATH...", "Scripts, notebooks, folders, or - for standard input."
    )
    form: str = option("text", None, "text, json, sarif or github.", flag="--format")
    select: list[str] | None = option(None, None, "Only these codes, such as WB101,WB103 or WB1.")
    ignore: list[str] | None = option(None, None, "All but these codes.")
    exclude: list[str] | None = option(None, None, "Leave these paths out.")
    fix: bool = option(False, None, "Repair what is certain.", flag="--fix")
    unsafe_fixes: bool = option(False, None, "Repair what is likely, too.", flag="--unsafe-fixes")
    diff: bool = option(False, None, "Show what --fix would change.", flag="--diff")
    statistics: bool = option(False, None, "Count the findings by rule.", flag="--statistics")
    exit_zero: bool = option(False, None, "Exit with 0 despite findings.", flag="--exit-zero")
    explain: str | None = option(None, None, "Show the page of a rule.")
    list_rules: bool = option(False, None, "Show all rules.", flag="--list-rules")
    jobs: int | None = option(None, None, "Processes (default: all cores).")
    output: str | None = option(None, None, "Write the findings to a file.")


@command(LintOptions)
def lint(options: LintOptions) -> None:
    """Find mistakes of gradient accumulation, without importing or running the code.

    Exit status: 0 clean (notes do not count), 1 findings, 2 wrong usage.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    raise typer.Exit(run(LintArguments(**given)))
