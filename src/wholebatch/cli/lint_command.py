"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

from typing import Annotated

import typer

from wholebatch.lint.command_line import LintOptions, run

__all__ = ["lint"]


def lint(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Scripts, notebooks or folders.", metavar="PATH...")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="text, json, sarif or github.")] = "text",
    select: Annotated[
        list[str] | None, typer.Option(help="Only these codes, such as WB101,WB103 or WB1.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="All but these codes.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave these paths out.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what is certain.")] = False,
    explain: Annotated[str | None, typer.Option(help="Show the page of a rule.")] = None,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Show all rules.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes (default: all cores).")] = None,
    output: Annotated[str | None, typer.Option(help="Write the findings to a file.")] = None,
) -> None:
    """Find mistakes of gradient accumulation, without importing or running the code.

    Exit status: 0 clean (notes do not count), 1 findings, 2 wrong usage.
    """
    status = run(
        LintOptions(
            paths=tuple(paths or ()),
            form=form,
            select=tuple(select or ()),
            ignore=tuple(ignore or ()),
            exclude=tuple(exclude or ()),
            fix=fix,
            explain=explain,
            list_rules=list_rules,
            jobs=jobs,
            output=output,
        )
    )
    raise typer.Exit(status)
