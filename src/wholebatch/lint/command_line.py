"""The command line that needs only Python: `python -m wholebatch.lint PATH...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .file_collection import collect, lint_files
from .findings import Finding
from .fix import fix_files
from .lint_settings import SettingsError, load_settings
from .output import FORMATS, render
from .rules import RULES, rule

__all__ = ["CLEAN", "FOUND", "USAGE", "Options", "main", "run"]

CLEAN, FOUND, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Options:
    """The options of one run."""

    paths: tuple[str, ...] = ()
    form: str = "text"
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fix: bool = False
    explain: str | None = None
    list_rules: bool = False
    jobs: int | None = None
    output: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; return 0 if clean, 1 with findings, 2 on wrong usage."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return run(_options(given))
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def _options(given: argparse.Namespace) -> Options:
    return Options(
        paths=tuple(given.paths),
        form=given.format,
        select=tuple(given.select),
        ignore=tuple(given.ignore),
        exclude=tuple(given.exclude),
        fix=given.fix,
        explain=given.explain,
        list_rules=given.list_rules,
        jobs=given.jobs,
        output=given.output,
    )


def run(options: Options) -> int:
    """Run once. Findings go to standard output, everything else to standard error."""
    if options.explain is not None:
        return _explain(options.explain)
    if options.list_rules:
        for known in RULES:
            print(f"{known.code} {known.name}: {known.summary}")
        return CLEAN
    if not options.paths:
        return _usage("no paths given: name files or folders, for example `wholebatch lint .`")
    if options.form not in FORMATS:
        return _usage(f"format={options.form!r}: must be one of {', '.join(FORMATS)}")
    if options.jobs is not None and options.jobs < 1:
        return _usage(f"jobs={options.jobs}: must be at least 1")
    try:
        settings = load_settings(
            Path.cwd(), select=options.select, ignore=options.ignore, exclude=options.exclude
        )
        files = collect(options.paths, settings)
    except SettingsError as error:
        return _usage(str(error))
    except FileNotFoundError as error:
        return _usage(f"{error}: no such file or folder")
    findings = lint_files(files, settings, jobs=options.jobs)
    repaired = 0
    if options.fix and any(f.fix for f in findings):
        repaired, problem = fix_files(findings, settings)
        if problem:
            return _usage(problem)
        findings = lint_files(files, settings, jobs=options.jobs)
    try:
        _write(render(findings, options.form), options.output)
    except OSError as error:
        if options.output is None:  # A failure of standard output is not about the option.
            raise
        return _usage(f"output={options.output!r}: cannot be written: {error.strerror}")
    _summary(files, findings, repaired, options.form)
    return _status(findings)


def _status(findings: Sequence[Finding]) -> int:
    return FOUND if any(f.level != "note" for f in findings) else CLEAN


def _write(rendered: str, output: str | None) -> None:
    if output is not None:
        Path(output).write_text(rendered + "\n", encoding="utf-8")
    elif rendered:
        print(rendered)


def _summary(files: Sequence[str], findings: Sequence[Finding], repaired: int, form: str) -> None:
    if form != "text":
        return
    fixable = sum(1 for f in findings if f.fix)
    words = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    words += f" in {len(files)} file{'' if len(files) == 1 else 's'}"
    if repaired:
        words += f", {repaired} fixed"
    if fixable:
        words += f", {fixable} fixable with --fix"
    print(words, file=sys.stderr)


def _explain(code: str) -> int:
    known = rule(code)
    if known is None:
        codes = ", ".join(r.code for r in RULES)
        return _usage(f"explain={code!r}: no such rule; rules are {codes}")
    print(known.page)
    return CLEAN


def _usage(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    package = (__package__ or "wholebatch.lint").replace("_", "-")
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__ or package}",
        description="Find mistakes of gradient accumulation in training scripts and notebooks.",
        epilog="Exit status: 0 clean (notes do not count), 1 findings, 2 wrong usage.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="scripts, notebooks or folders")
    parser.add_argument("--format", default="text", choices=sorted(FORMATS))
    parser.add_argument(
        "--select", action="append", default=[], metavar="CODES", help="only these (WB101,WB103)"
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="CODES", help="all but these"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave these paths out"
    )
    parser.add_argument("--fix", action="store_true", help="repair what is certain")
    parser.add_argument("--explain", metavar="CODE", help="show the page of a rule")
    parser.add_argument("--list-rules", action="store_true", help="show all rules")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--output", metavar="FILE", help="write the findings to a file")
    return parser
