"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.cli.command_options import argument, command, option, whole_number


@dataclass(frozen=True)
class LintOptions:
    """The options of `wholebatch lint`, which become those of the linter."""

    paths: list[str] | None = argument(
        None, "PATH...", "Scripts, notebooks, folders, or - for standard input."
    )
    form: str = option("text", "text|json|sarif|github", "Output format.", flag="--format")
    select: list[str] | None = option(None, "CODES", "Check only these: WB101,WB103 or WB1.")
    ignore: list[str] | None = option(None, "CODES", "Check all but these.")
    exclude: list[str] | None = option(None, "GLOB", "Skip these paths.")
    fix: bool = option(False, None, "Repair what is certain.", flag="--fix")
    unsafe_fixes: bool = option(False, None, "Also repair what is likely.", flag="--unsafe-fixes")
    diff: bool = option(False, None, "Show what --fix would change.", flag="--diff")
    statistics: bool = option(False, None, "Count the findings by rule.", flag="--statistics")
    exit_zero: bool = option(False, None, "Exit with 0 despite findings.", flag="--exit-zero")
    explain: str | None = option(None, "CODE", "Show the page of a rule.")
    list_rules: bool = option(False, None, "List all rules.", flag="--list-rules")
    jobs: int | None = option(
        None, "N", "Number of processes. Default: all cores.", check=whole_number()
    )
    output: str | None = option(None, "FILE", "Write the findings to a file.")


@command(
    LintOptions,
    "wholebatch lint train.py",
    "wholebatch lint src/ --format github",
    "wholebatch lint train.py --fix",
    "wholebatch lint --explain WB101",
)
def lint(options: LintOptions) -> int:
    """Find gradient accumulation mistakes in scripts and notebooks.

    The code is read, not imported or run. Exit status: 0 clean (notes do not count), 1 findings,
    2 wrong usage.
    """
    from wholebatch.lint.command_line import LintArguments, run

    given = {name: value for name, value in vars(options).items() if value is not None}
    return run(LintArguments(**given))
