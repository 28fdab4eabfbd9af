"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from wholebatch.cli.command_options import argument, choice, command, option, switch
from wholebatch.errors import OptionError
from wholebatch.lint import RULES, Settings
from wholebatch.lint.check_files import lint_files
from wholebatch.lint.lint_settings import OTHER_CODES, codes
from wholebatch.lint.output_formats import FORMATS, summary
from wholebatch.lint.source_files import collect

CLEAN, FOUND, UNREAD = 0, 1, 2


@dataclass(frozen=True)
class LintOptions:
    """The options of `wholebatch lint`."""

    paths: list[str] = argument(
        (), "PATH...", "Scripts, notebooks and folders (this one if none is given)."
    )
    select: list[str] = option(
        (), "CODES", "Check only these rules: WB101,WB103, or WB1 for all WB1xx.", "Rules"
    )
    ignore: list[str] = option((), "CODES", "Check all rules but these.", "Rules")
    explain: str | None = option(None, "CODE", "Show what a rule finds, and its page.", "Rules")
    list_rules: bool = switch("Show all rules.", "Rules")
    exclude: list[str] = option((), "GLOB", "Leave out these paths of a folder.", "Files")
    format: str = choice(
        "text|json|github",
        "Lines for a terminal, a list of findings, or annotations of a pull request.",
        "Output",
    )
    exit_zero: bool = switch("Exit with 0 despite findings.", "Output")


@command(
    LintOptions, "wholebatch lint src/ --select WB1", "wholebatch lint train.py --format github"
)
def lint(options: LintOptions) -> int:
    """Find gradient accumulation mistakes in scripts and notebooks.

    The code is read, never imported or run. Exit status: 0 clean (notes do not count), 1 findings,
    2 wrong usage, or a file that cannot be read.
    """
    if options.explain is not None:
        print(_explanation(options.explain))
        return CLEAN
    if options.list_rules:
        lines = [f"{rule.code} {rule.name}: {rule.summary}" for rule in RULES]
        print("\n".join(_wrapped(line, indent="      ") for line in lines))
        return CLEAN
    settings = Settings(codes(options.select), codes(options.ignore), tuple(options.exclude))
    paths = options.paths or ["."]
    for path in paths:
        if not os.path.exists(path):
            raise OptionError(f"{path}: there is no such file or folder")
    files = collect(paths, settings)
    findings = lint_files(files, settings, named={str(Path(path)) for path in paths})
    if not files:
        print(f"warning: no script or notebook to read in {', '.join(paths)}", file=sys.stderr)
    rendered = FORMATS[options.format](findings)
    if rendered:
        print(rendered)
    if options.format == "text" and files:
        print(summary(findings, len(files)), file=sys.stderr)
    if any(finding.level == "unread" for finding in findings):
        return UNREAD
    failed = any(finding.level == "error" for finding in findings) and not options.exit_zero
    return FOUND if failed else CLEAN


def _explanation(code: str) -> str:
    """Return the docstring of a rule, and the path of its page in a checkout."""
    for rule in RULES:
        if rule.code == code.upper():
            about = "\n\n".join(map(_wrapped, rule.explanation.split("\n\n")))
            page = Path(__file__).parents[3] / "docs" / "lint" / f"{rule.code}.md"
            told = f"\n\n{page}" if page.is_file() else ""
            return f"{rule.code}: {rule.name} ({rule.level})\n\n{about}{told}"
    if code.upper() in OTHER_CODES:
        return _wrapped(f"{code.upper()}: {OTHER_CODES[code.upper()]}")
    codes = ", ".join(rule.code for rule in RULES)
    raise OptionError(f"--explain {code}: no such rule; rules are {codes}")


def _wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph with lines as wide as the terminal."""
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.fill(
        " ".join(text.split()), width, subsequent_indent=indent, break_long_words=False
    )
