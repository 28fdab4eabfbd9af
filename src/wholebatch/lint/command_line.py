"""The command line: `wholebatch lint PATH...`, or `python -m wholebatch.lint` without torch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from .check_files import Finding, check_source, lint_files
from .lint_settings import OTHER_CODES, SettingsError, load_settings
from .output_formats import FORMATS
from .rules import RULES
from .source_files import Source, collect

CLEAN, FOUND, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run once: findings go to standard output, everything else to standard error.

    Return 0 if clean (notes do not count), 1 with findings, 2 on wrong usage.
    """
    given = _parsed(argv)
    try:
        if given.explain is not None:
            print(_explanation(given.explain))
            return CLEAN
        if given.list_rules:
            lines = [f"{rule.code} {rule.name}: {rule.summary}" for rule in RULES]
            print("\n".join(_wrapped(line, indent="      ") for line in lines))
            return CLEAN
        return _lint(given)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def _lint(given: argparse.Namespace) -> int:
    for name, values in (("PATH", given.paths), ("--exclude", given.exclude)):
        if "" in values:
            raise SettingsError(f'{name} "": is empty; give a value (a variable that is not set?)')
    if given.form not in FORMATS:
        raise SettingsError(f"--format {given.form}: must be one of {', '.join(FORMATS)}")
    settings = load_settings(
        Path.cwd(), select=given.select, ignore=given.ignore, exclude=given.exclude
    )
    if "-" in given.paths:
        files = ["-"]
        findings = check_source(Source("-", sys.stdin.read()), settings)
    else:
        paths = given.paths or ["."]
        for path in paths:
            if not os.path.exists(path):
                raise SettingsError(f"{path}: there is no such file or folder")
        files = collect(paths, settings)
        if not files:
            print(f"warning: no script or notebook to read in {', '.join(paths)}", file=sys.stderr)
        findings = lint_files(files, settings, named={str(Path(path)) for path in paths})
    rendered = FORMATS[given.form](findings)
    if rendered:
        print(rendered)
    if given.form == "text" and files:
        print(_summary(findings, len(files)), file=sys.stderr)
    failed = any(f.level != "note" for f in findings) and not given.exit_zero
    return FOUND if failed else CLEAN


def _summary(findings: Sequence[Finding], files: int) -> str:
    notes = sum(finding.level == "note" for finding in findings)
    found = _counted(len(findings) - notes, "finding")
    if notes:
        found += f" and {_counted(notes, 'note')}"
    return f"{found} in {_counted(files, 'file')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _explanation(code: str) -> str:
    """Return the docstring of a rule and the address of its page."""
    for rule in RULES:
        if rule.code == code.upper():
            about = "\n\n".join(map(_wrapped, rule.explanation.split("\n\n")))
            return f"{rule.code}: {rule.name} ({rule.level})\n\n{about}\n\n{rule.page}"
    if code.upper() in OTHER_CODES:
        return _wrapped(f"{code.upper()}: {OTHER_CODES[code.upper()]}")
    codes = ", ".join(rule.code for rule in RULES)
    raise SettingsError(f"--explain {code}: no such rule; rules are {codes}")


def _wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph with lines as wide as the terminal; code stays as it is."""
    if "\n " in text:
        return text
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, in the words of the other commands."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "needs a value")
        message = message.replace("ignored explicit argument", "takes no value, but was given")
        self.exit(USAGE, f"error: {message} (see --help)\n")


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; refuse an unknown one with the option that may be meant."""
    parser = _parser()
    given, unknown = parser.parse_known_intermixed_args(arguments)
    if not unknown:
        return given
    flags = re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE)
    close = get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    meant = f"did you mean {close[0]}?" if close else "see --help"
    parser.exit(USAGE, f"error: no such option: {unknown[0]} ({meant})\n")


def _parser() -> argparse.ArgumentParser:
    width = min(100, shutil.get_terminal_size().columns)
    about = (
        "Find gradient accumulation mistakes in scripts and notebooks.",
        "The code is read, never imported or run. Exit status: 0 clean (notes do not count), "
        "1 findings, 2 wrong usage.",
    )
    parser = _Parser(
        prog="wholebatch lint",
        usage="wholebatch lint [PATH...] [options]",
        description="\n\n".join(textwrap.fill(paragraph, width) for paragraph in about),
        epilog="examples:\n"
        "  wholebatch lint src/ --select WB1\n"
        "  wholebatch lint train.py --format github",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width),
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH...",
        help="Scripts, notebooks and folders; - is standard input. [default: .]",
    )
    rules = parser.add_argument_group("Rules")
    for group, name, metavar, help in (
        (rules, "--select", "CODES", "Check only these rules: WB101,WB103, or WB1 for all WB1xx."),
        (rules, "--ignore", "CODES", "Check all rules but these."),
        (parser, "--exclude", "GLOB", "Leave out these paths."),
    ):
        group.add_argument(name, action="append", default=[], metavar=metavar, help=help)
    rules.add_argument("--explain", metavar="CODE", help="Show what a rule finds, and its page.")
    rules.add_argument("--list-rules", action="store_true", help="Show all rules.")
    output = parser.add_argument_group("Output")
    output.add_argument(
        "--format",
        dest="form",
        default="text",
        metavar="|".join(FORMATS),
        help="text: lines for a terminal. json: a list of findings. github: annotations of a pull "
        "request. [default: text]",
    )
    output.add_argument("--exit-zero", action="store_true", help="Exit with 0 despite findings.")
    return parser
