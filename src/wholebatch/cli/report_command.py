"""`wholebatch report`: runs, plans, tunings and verdicts as one HTML page that works offline."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from wholebatch.cli.command_options import argument, command, must_be, option, switch
from wholebatch.cli.report.terminal_output import Spinner, console_of, path_from_here, say
from wholebatch.readable_sizes import bytes_said


@dataclass(frozen=True)
class ReportOptions:
    """The options of `wholebatch report`."""

    runs: list[Path] = argument(
        MISSING,
        "RUN...",
        "Folders of runs. Also files that plan --json, verify --json, tune and bench write.",
    )
    out: Path | None = option(
        None,
        "FILE.html",
        "Where to write the page. Default: report.html in the run's folder, or here for several.",
        check=must_be(
            "the name of an .html file", lambda out: out.suffix.lower() in (".html", ".htm")
        ),
    )
    title: str | None = option(None, "TEXT", "Title of the page.")
    show: bool = switch("Open it in the browser.", flag="--open")


@command(
    ReportOptions,
    "wholebatch report runs/one --open",
    "wholebatch report runs/one runs/two --out compare.html",
    "wholebatch report bench.json",
)
def report(options: ReportOptions) -> None:
    """Write one HTML page that compares runs and measurements.

    The page shows loss, learning rate, speed, memory and the time of each part of a window. It is
    one file and needs no network.
    """
    runs, out = options.runs, options.out
    if out is None:
        out = (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "report.html"

    console = console_of()
    with Spinner(console) as doing:
        doing("drawing the page")
        from wholebatch.cli.report.html_report import write_report

        written = write_report(runs, out, title=options.title)
    size = bytes_said(written.stat().st_size)
    say(console, f"{path_from_here(written)} ({size}, one file, works offline)")
    if options.show:
        import webbrowser

        if not webbrowser.open(written.resolve().as_uri()):
            say(console, "no browser was found here; open the file yourself")
