"""`wholebatch report`: runs, plans, tunings and verdicts as one HTML page that works offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wholebatch.core.readable_sizes import bytes_said
from wholebatch.errors import OptionError

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, side by side; also files that [bold]plan --json[/], "
            "[bold]verify --json[/], [bold]tune[/] and the benchmarks write.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Where the page is written. Default: report.html in the run's folder, or here "
            "for several.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The page's title.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page: loss, speed and memory, the time split, the verdict.

    It needs no network, neither to be made nor to be read.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--out {out}: must be the name of an .html file")
    if out is None:
        out = (
            runs[0] / "report.html" if len(runs) == 1 and runs[0].is_dir() else Path("report.html")
        )

    from wholebatch.cli.report.html_report import write_report

    written = write_report(runs, out, title=title)
    print(f"{written} ({bytes_said(written.stat().st_size)}, one file, works offline)")
    if show:
        import webbrowser

        if not webbrowser.open(written.resolve().as_uri()):
            print("no browser was found here; open the file yourself")
