"""`wholebatch report`: runs, plans, tunings and verdicts as one HTML page that works offline."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from wholebatch.cli.command_options import argument, command, must_be, option
from wholebatch.core.readable_sizes import bytes_said


@dataclass(frozen=True)
class ReportOptions:
    """The options of `wholebatch report`."""

    runs: list[Path] = argument(
        MISSING,
        "RUN...",
        "Folders of runs, side by side; also files that [bold]plan --json[/], "
        "[bold]verify --json[/], [bold]tune[/] and the benchmarks write.",
    )
    out: Path | None = option(
        None,
        "FILE.html",
        "Where the page is written. Default: report.html in the run's folder, or here for several.",
        check=must_be(
            "the name of an .html file", lambda out: out.suffix.lower() in (".html", ".htm")
        ),
    )
    title: str | None = option(None, "TEXT", "The page's title.")
    show: bool = option(False, None, "Open it in the browser.", flag="--open")


@command(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write one self-contained HTML page: loss, speed and memory, the time split, the verdict.

    It needs no network, neither to be made nor to be read.
    """
    runs, out = options.runs, options.out
    if out is None:
        out = (
            runs[0] / "report.html" if len(runs) == 1 and runs[0].is_dir() else Path("report.html")
        )

    from wholebatch.cli.report.html_report import write_report

    written = write_report(runs, out, title=options.title)
    print(f"{written} ({bytes_said(written.stat().st_size)}, one file, works offline)")
    if options.show:
        import webbrowser

        if not webbrowser.open(written.resolve().as_uri()):
            print("no browser was found here; open the file yourself")
