"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.cli.command_options import argument, command, option, switch, whole_number


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
    fix: bool = switch("Repair what is certain.")
    unsafe_fixes: bool = switch("Also repair what is likely.")
    diff: bool = switch("Show what --fix would change.")
    statistics: bool = switch("Count the findings by rule.")
    exit_zero: bool = switch("Exit with 0 despite findings.")
    explain: str | None = option(None, "CODE", "Show the page of a rule.")
    list_rules: bool = switch("List all rules.")
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
