"""`wholebatch report`: one HTML page with the plots and settings of one or more runs."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from wholebatch.cli.command_options import (
    argument,
    command,
    option,
    positive_number,
)
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    path_from_here,
    say,
    short_duration,
)
from wholebatch.cli.report.tuned import TUNED, tuned_table
from wholebatch.cli.run_settings import read_config
from wholebatch.cli.updates_made import not_whole
from wholebatch.errors import MissingExtraError, OptionError
from wholebatch.plain_files import load_json, reason, write_atomically
from wholebatch.readable_sizes import memory_said, percent

PLOTS = {
    "loss": ("Loss", "loss"),
    "units_per_second": ("Throughput", "units per second"),
    "memory": ("Peak memory", "MiB"),
    "grad_norm": ("Gradient norm", "norm"),
}
"""The plots of the page: the field of a record, its title, and its axis."""
_SECOND = {
    "loss": ("validation_loss", "held out", "dotted"),
    "memory": ("undivided_memory", "undivided", "dashed"),
}
"""The fields that are drawn beside those, their names, and how their lines are dashed."""

_RIGHT, _WRONG, _UNKNOWN = ("✓", "right"), ("✗", "wrong"), ("?", "unknown")
_LABELS = {
    "loop": "loop",
    "of_samples": "samples in the batch",
    "samples": "samples compared",
    "micro_batches": "micro-batches",
    "undivided": "batch not split (BatchNorm)",
    "precision": "precision",
    "device": "device",
    "ranks": "ranks",
    "seconds": "seconds that the proof took",
}
"""The plain values of a verdict, as the page names them."""
_MOST_POINTS = 2000
COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#a34fc4", "#c49a00", "#6b7280")
"""One colour for each run, that can be read on white and on dark grey."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `wholebatch report`."""

    sources: list[str] = argument(
        MISSING,
        "RUN...",
        "Folders that wholebatch train wrote, and JSON files of wholebatch verify --json and "
        "wholebatch tune --json.",
    )
    out: Path = option(Path("report.html"), "FILE", "The page.")
    price: float | None = option(
        None, "PRICE", "Price of a GPU hour: adds what runs and epochs cost.", check=positive_number
    )


@command(
    ReportOptions,
    "wholebatch report runs/first runs/second --out compared.html",
    "wholebatch report runs/first verify.json",
    "wholebatch report before.json after.json --out tuned.html",
)
def report(options: ReportOptions) -> None:
    """Write one HTML page that compares runs and measurements.

    What each run's updates are, memory and time come first, then loss, throughput, memory and
    gradient norm as plots, then tables. A verdict is shown with the runs of its recipe. It needs no
    network.
    """
    console = console_of()
    with Spinner(console) as doing:
        doing("drawing the page")
        if options.out.is_dir():
            raise OptionError(f"--out {options.out}: is a folder; give the name of a file")
        sources = [Path(source) for source in options.sources]
        text = page(sources, price=options.price)
        write_atomically(options.out, text, OptionError)
    say(console, f"page: {path_from_here(options.out)}")


def page(sources: list[Path], *, price: float | None = None) -> str:
    """Return the page of these runs and verdicts."""
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "report", "wholebatch report") from None
    runs = [_read_run(path) for path in sources if path.is_dir()]
    verdicts, measured = [], []
    for path in sources:
        if path.is_dir():
            continue
        stored = load_json(path, OptionError, path)
        if isinstance(stored, dict) and stored.get("kind") == TUNED:
            measured.append({**stored, "name": path.name})
        elif isinstance(stored, dict) and "same" in stored:
            verdicts.append(_verdict(stored, path, runs))
        else:
            raise OptionError(
                f"{path}: is not a file of wholebatch verify --json or wholebatch tune --json"
            )
    for place, run in enumerate(runs):
        run |= {"name": str(run["path"]), "colour": COLOURS[place % len(COLOURS)]}
    keys = (key for run in runs for key, value in run["settings"].items() if value is not None)
    settings = list(dict.fromkeys(keys))
    template = Path(__file__).parent / "report" / "page.html"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=_title(runs, verdicts, measured),
        heads=[_head(run, verdicts) for run in runs],
        runs=runs,
        verdicts=verdicts,
        tuned=[tuned_table(measured)] if measured else [],
        plots=[_plot(runs, *plot) for plot in _plots_of(runs).items()] if runs else [],
        settings=[
            (key.replace("_", " "), [_shown(run["settings"].get(key)) for run in runs])
            for key in settings
        ],
        results=_results(runs, price),
    )


# ------------------------------------------------------------------------------------- reading


def _read_run(path: Path) -> dict[str, Any]:
    """Return the settings and the records of a run's folder."""
    if not (path / "config.json").exists():
        raise OptionError(f"{path}: has no config.json; give the folder of a run")
    config = read_config(path / "config.json")
    about = {key: config.get(key) for key in ("recipe", "device", "ranks")}
    versions = config.get("versions") or {}
    about |= {name: versions.get(name) for name in ("wholebatch", "torch", "python")}
    git = config.get("git") or {}
    about["commit"] = f"{git['commit'][:10]}{', changed' * git['dirty']}" if git else None
    settings = {**about, **config["settings"]}
    return {
        "path": path,
        "recipe_sha256": config.get("recipe_sha256"),
        "settings": settings,
        "unit": config.get("unit", "units"),
        "epoch_batches": config.get("epoch_batches"),
        "records": _seen(_records(path / "metrics.jsonl")),
    }


def _seen(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each record the units that all windows up to it have seen."""
    units = 0.0
    for record in records:
        units += record.get("units") or 0.0
        record["seen"] = units
    return records


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`; one that is being written now is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {reason(error)}") from error
    windows = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            windows.append({"window": int(record["window"]), **record})
        except (ValueError, KeyError, TypeError):
            raise OptionError(f"{path}: line {number} is not the record of a window") from None
    return windows


def _verdict(verdict: dict[str, Any], path: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a verdict: its line in words, what it is of, and rows with its other plain values."""
    mark = _RIGHT if verdict.get("same") else _WRONG
    compared = [verdict[key] for key in ("gradient", "update", "float64") if verdict.get(key)]
    whose = verdict.get("recipe") or verdict.get("loop") or "another file"
    is_of_none = bool(runs) and not any(_belongs(verdict, run) for run in runs)
    return {
        **verdict,
        "name": path.name,
        "line": verdict.get("line", ""),
        "mark": mark if verdict.get("judged", True) or mark is _RIGHT else _UNKNOWN,
        "of": f"Of {whose}, with other settings or another file than the runs above: it says "
        "nothing of them."
        if is_of_none
        else "",
        "compared": [
            [part["what"], *(_distance(part[key]) for key in ("distance", "tolerance"))]
            for part in compared
        ],
        "table": verdict.get("table", ()),
        "advice": verdict.get("advice", ()),
        "notes": verdict.get("notes", ()),
        "rows": [
            (label, _shown(verdict[key]))
            for key, label in _LABELS.items()
            if verdict.get(key) not in (None, False, "")
        ],
    }


def _belongs(verdict: dict[str, Any], run: dict[str, Any]) -> bool:
    """True if a verdict is of a run's recipe, and of the settings that decide its update."""
    settings = run["settings"]
    return (
        run["recipe_sha256"] is not None
        and verdict.get("recipe_sha256") == run["recipe_sha256"]
        and verdict.get("batchnorm") == settings.get("batchnorm")
        and verdict.get("precision") == settings.get("precision")
    )


def _title(
    runs: list[dict[str, Any]], verdicts: list[dict[str, Any]], measured: list[dict[str, Any]]
) -> str:
    """Return what the page is about: the recipes, the verdict, or the settings."""
    recipes = dict.fromkeys(Path(str(run["settings"]["recipe"])).stem for run in runs)
    if not recipes and measured and not verdicts:
        return "Settings, measured"
    if not recipes:
        return "Is the update that of the whole batch?"
    several = f", {len(runs)} runs" if len(runs) > 1 else ""
    return f"{', '.join(recipes)}{several}{' and a verdict' if verdicts else ''}"


def _head(run: dict[str, Any], verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first lines about a run: its verdicts, its updates, memory, and time."""
    own = [verdict for verdict in verdicts if _belongs(verdict, run)]
    seen = [record["batchnorm_saw"] for record in run["records"] if record.get("batchnorm_saw")]
    records, settings = run["records"], run["settings"]
    done, total = _last(run, "update") or 0, settings["updates"]
    spent = [record.get("seconds") or 0.0 for record in records]
    left = short_duration(sum(spent) / done * (total - done)) if done < total and done else ""
    losses = f"{_shown(records[0].get('loss'))} → {_shown(_last(run, 'loss'))}" if records else ""
    return {
        "name": run["name"],
        "colour": run["colour"],
        "verdicts": own,
        "unproven": "Not proven on this page: add the file of wholebatch verify "
        f"{run['settings']['recipe']} --json, with the settings of this run.",
        "updates": not_whole(seen) if seen else "those of the whole batch, by sums and units",
        "memory": memory_said(_last(run, "memory"), _last(run, "undivided_memory")),
        "time": f"{short_duration(sum(spent))} for {done:,} of {total:,} updates"
        + (f", {left} left" if left else ""),
        "loss": losses,
    }


def _last(run: dict[str, Any], field: str) -> Any:
    values = (record.get(field) for record in reversed(run["records"]))
    return next((value for value in values if value is not None), None)


# ------------------------------------------------------------------------------------- showing


def _plot(runs: list[dict[str, Any]], field: str, words: tuple[str, str]) -> dict[str, Any]:
    """Return a plot over the updates: a line for each run, and a second one in some plots."""
    traces = []
    second, name, dash = _SECOND.get(field, ("", "", ""))
    for run in runs:
        about = {"colour": run["colour"], "dash": ""}
        traces.append({"name": run["name"], **about, **_points(run["records"], field)})
        points = _points(run["records"], second)
        if points["x"]:
            traces.append({"name": f"{run['name']}, {name}", **about, "dash": dash, **points})
    return {"title": words[0], "axis": words[1], "traces": traces}


def _plots_of(runs: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the plots, with the recipe's own word for its units if all runs have the same."""
    units = {str(run["unit"]) for run in runs}
    unit = units.pop() if len(units) == 1 else "units"
    return {**PLOTS, "units_per_second": ("Throughput", f"{unit} per second")}


def _points(records: list[dict[str, Any]], field: str) -> dict[str, list[Any]]:
    """Return the points of a curve, thinned to a number that a browser draws at once."""
    unit = 2**20 if field.endswith("memory") else 1
    points = [it for it in records if it.get(field) is not None]
    step = -(-len(points) // _MOST_POINTS) or 1
    points = [*points[::step], *points[-1:]] if step > 1 else points
    return {
        "x": [it.get("update", it["window"]) for it in points],
        "seen": [it["seen"] for it in points],
        "y": [it[field] / unit for it in points],
    }


def _results(runs: list[dict[str, Any]], price: float | None) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of results: one column for each run."""
    rows: dict[str, list[Any]] = {
        "began": [_time(run["records"][0].get("time")) if run["records"] else None for run in runs],
        "held-out loss": [_last(run, "validation_loss") for run in runs],
        "micro-batches in the first update": [
            run["records"][0].get("micro_batches") if run["records"] else None for run in runs
        ],
        "windows without an update": [
            sum(record.get("skipped") is not None for record in run["records"]) for run in runs
        ],
    }
    if price is not None:
        rows["cost"] = [_cost(run, price, len(run["records"])) for run in runs]
        rows["cost of an epoch"] = [_cost(run, price, run["epoch_batches"]) for run in runs]
    return [
        (name, [_shown(value) for value in values])
        for name, values in rows.items()
        if any(value is not None for value in values)
    ]


def _cost(run: dict[str, Any], price: float, windows: int | None) -> float | None:
    """Return what so many windows cost on all GPUs of the run, by their mean time."""
    spent = [record.get("seconds") or 0.0 for record in run["records"]]
    if not spent or windows is None:
        return None
    return sum(spent) / len(spent) * windows / 3600 * price * (run["settings"].get("ranks") or 1)


def _time(seconds: float | None) -> str | None:
    """Return a time of `metrics.jsonl` in this machine's time zone."""
    return None if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _distance(part: float | None) -> str:
    return "not finite" if part is None else percent(part)


def _shown(value: Any) -> str:
    """Return a value as a person reads it.

    >>> _shown(1234567), _shown(0.123456789), _shown(None)
    ('1,234,567', '0.1235', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
