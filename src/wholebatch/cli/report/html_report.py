"""A page of everything given: runs, plans, tunings, verdicts and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wholebatch.cli.report.html_page import HtmlPage, Section, write_page
from wholebatch.cli.report.page_sources import Sources, read_sources
from wholebatch.cli.report.result_sections import (
    benchmarks,
    learning,
    memory,
    split,
    tuning,
    verification,
    way,
)
from wholebatch.cli.report.training_section import overview, training

_MOST_SPLITS = 8


def write_report(paths: Sequence[Path], to: Path, *, title: str | None = None) -> Path:
    """Write the page of these runs and files; this is `wholebatch report`."""
    return write_page(make_page(read_sources(paths), title=title), to)


def make_page(sources: Sources, *, title: str | None = None) -> HtmlPage:
    """Return a page with every section that has content."""
    units = [str(run.manifest.get("unit", "units")) for run in sources.runs]
    verdicts: dict[str, dict[str, Any]] = dict(sources.verdicts)
    plans = [
        (name, {**tuned["memory"], "subject": tuned.get("subject"), "by": "tune"})
        for name, tuned in sources.tunes
        if tuned.get("memory")
    ]
    sections: list[Section | None] = [
        overview(sources.runs, units, verdicts),
        training(sources.runs, units),
        tuning(sources.tunes),
        memory([*sources.plans, *plans]),
        split(_splits(sources)),
        verification(sources.verdicts),
        learning(sources.curves),
        *benchmarks(sources.benchmarks),
    ]
    files = (sources.tunes, sources.plans, sources.verdicts, sources.benchmarks, sources.curves)
    names = [run.name for run in sources.runs] or [name for kind in files for name, _ in kind]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return HtmlPage(
        title or f"wholebatch: {shown}",
        f"Made {time.strftime('%Y-%m-%d %H:%M')}",
        tuple(section for section in sections if section is not None),
    )


def _splits(sources: Sources) -> list[tuple[str, Mapping[str, float]]]:
    """Return the splits of each tuning's fastest settings."""
    found: list[tuple[str, Mapping[str, float]]] = []
    for name, tuned in sources.tunes:
        measured = [trial for trial in tuned["trials"] if trial.get("split")]
        measured.sort(key=lambda trial: -trial["units_per_second"])
        subject = tuned.get("subject") or name
        for trial in measured[:_MOST_SPLITS]:
            mark = " ▸" if trial.get("recommended") else ""
            size = f"{trial['micro_batch']} × {trial['steps']}"
            found.append((f"{subject}: {size}, {way(trial)}{mark}", trial["split"]))
    return found
