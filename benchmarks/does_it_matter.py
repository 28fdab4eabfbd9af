"""Does an exact update make a better model? Tables and plots of docs/does-it-matter.md.

    python benchmarks/does_it_matter.py                # all settings
    python benchmarks/does_it_matter.py --only sft     # measure one of them again
    python benchmarks/does_it_matter.py --draw         # tables and plots of the saved results

Each setting is trained with the same data order and seeds: with the undivided batch (the truth), by
the usual loop, by each trainer's own accumulation, and by wholebatch. Every way is trained twice:
at the learning rate that is best for the undivided batch, and at the one that is best for itself.
A rate is the best of six by the held-out loss over seeds that the study does not use. A trainer
whose first run ends with the weights of the undivided batch or of the usual loop is not run again.

Differences are paired by seed; the interval is Student's, at 95%.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_LOG_LEVEL": "error"}

import torch  # noqa: E402
from matter import charts, small_batch  # noqa: E402
from matter.tasks import SETTINGS, Setting  # noqa: E402
from matter.ways import run, ways_of  # noqa: E402
from pages import written  # noqa: E402
from scipy import stats  # noqa: E402

RESULTS = ROOT / "docs" / "benchmarks" / "does_it_matter.json"
PAGE = ROOT / "docs" / "does-it-matter.md"
IMAGES = ROOT / "docs" / "images"
SEEDS = range(10)
CHOOSING_SEEDS = (100, 101)
"""The seeds with which the learning rates are chosen."""
SMALL_BATCH_SEEDS = range(3)
POINTS = 12
REVERSED = "undivided, other order"
"""The way whose drift is rounding alone."""
REVERSED_SEEDS = 3
SAME = 0.001
"""Weights that drift less than this, as a share of the way, are those of another run."""
TRAINERS = (
    "Accelerate",
    "Lightning",
    "HF Trainer",
    "HF Trainer, accepts_loss_kwargs=False",
    "exact(Trainer)",
    "GradCache",
)


def drift(result: dict[str, Any], truth: dict[str, Any]) -> float:
    """Return how far apart the last weights are, as a share of the way that the truth went."""
    way = (truth["after"] - truth["before"]).norm()
    return float((result["after"] - truth["after"]).norm() / way)


def losses_by_rate(setting: Setting, way: str) -> dict[float, float]:
    """Return the mean held-out loss of a way for each learning rate."""
    return {
        rate: statistics.fmean(
            run(setting.task(seed, rate), way, seed, points=1)["loss"] for seed in CHOOSING_SEEDS
        )
        for rate in setting.rates
    }


def best_of(tried: dict[float, float]) -> float:
    return min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)


def measured(setting: Setting) -> dict[str, Any]:
    """Train a setting in all ways, at the truth's best learning rate and at each way's own."""
    tried = losses_by_rate(setting, "undivided")
    rate = best_of(tried)
    print(f"{setting.title}: {tried}, so {rate}", flush=True)
    rows: dict[str, Any] = {}
    for seed in SEEDS:
        results: dict[str, Any] = {}
        for way in ways_of(setting.task(seed, rate)):
            if seed > 0 and rows[way].get("same_as"):
                continue
            if way == REVERSED and seed >= REVERSED_SEEDS:
                continue
            begin = time.process_time()
            results[way] = run(setting.task(seed, rate), way, seed, POINTS)
            kept = {name: results[way][name] for name in ("curve", "loss", "metric", "updates")}
            kept["drift"] = drift(results[way], results["undivided"])
            row = rows.setdefault(way, {"runs": []})
            row["runs"].append(kept)
            print(
                f"{setting.title}, {way}, seed {seed}: loss {kept['loss']:.4f}, metric "
                f"{kept['metric']:.3f}, drift {kept['drift']:.1e}, "
                f"{time.process_time() - begin:.0f} s",
                flush=True,
            )
            if way in TRAINERS:
                for other in ("undivided", "usual loop"):
                    if drift(results[way], results[other]) < SAME:
                        row["same_as"] = other
    for way, row in rows.items():
        if way not in ("undivided", REVERSED, "wholebatch") and "same_as" not in row:
            row["own_rate"] = at_own_rate(setting, way, rate)
    about = {"title": setting.title, "metric": setting.metric, "units": setting.units}
    when = {"date": date.today().isoformat(), "torch": torch.__version__}
    return {**about, **when, "rate": rate, "rates": tried, "ways": rows}


def at_own_rate(setting: Setting, way: str, rate_of_truth: float) -> dict[str, Any]:
    """Return the best learning rate of a way, and its runs there if it is not the truth's."""
    tried = losses_by_rate(setting, way)
    rate = best_of(tried)
    print(f"{setting.title}, {way}: {tried}, so {rate}", flush=True)
    runs = []
    if rate != rate_of_truth:
        for seed in SEEDS:
            result = run(setting.task(seed, rate), way, seed, points=1)
            runs.append({"loss": result["loss"], "metric": result["metric"]})
    return {"rate": rate, "rates": tried, "runs": runs}


def mean_and_deviation(values: list[float], form: str) -> str:
    """Return mean ± standard deviation."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form)}"


def of_runs(row: dict[str, Any], name: str) -> list[float]:
    return [float(run[name]) for run in row["runs"]]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean, by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    return mean - half, mean + half


def verdict(row: dict[str, Any], truth: dict[str, Any]) -> str:
    """Return the paired difference of the held-out losses, its interval, and what follows."""
    pairs = zip(of_runs(row, "loss"), of_runs(truth, "loss"), strict=True)
    apart = [ours - right for ours, right in pairs]
    if not all(map(math.isfinite, apart)):
        return "diverged"
    low, high = interval(apart)
    if max(abs(low), abs(high)) < 1.5e-3:
        return "none"
    answer = "worse" if low > 0 else "better" if high < 0 else "not shown"
    return f"{statistics.fmean(apart):+.3f} [{low:+.3f}, {high:+.3f}]: {answer}"


def half_way(row: dict[str, Any], truth: dict[str, Any]) -> str:
    """Say how many samples a way needs to the loss that the truth has after half of its samples.

    The answer is a multiple of what the truth needs to first reach it, with its 95% interval.
    """
    shares = []
    for run_of_way, run_of_truth in zip(row["runs"], truth["runs"], strict=True):
        curve = run_of_truth["curve"]
        goal = min(curve, key=lambda point: abs(point[0] - curve[-1][0] / 2))[1]
        needed = small_batch.tokens_to(run_of_truth["curve"], goal)
        if needed == 0:  # The truth ends no better than it begins.
            return "–"
        shares.append(small_batch.tokens_to(run_of_way["curve"], goal) / needed)
    missing = sum(map(math.isinf, shares))
    if missing:
        return f"never in {missing} of {len(shares)}"
    if max(abs(share - 1) for share in shares) < 5e-3:
        return "1.00×"
    low, high = interval(shares)
    return f"{statistics.fmean(shares):.2f}× [{low:.2f}, {high:.2f}]"


def table(setting: dict[str, Any]) -> list[str]:
    """Return the lines of one setting's table."""
    lines = [
        f"| | rate | held-out loss | {setting['metric']} | samples to half-way "
        "| weights drift by | difference in loss, 95% interval |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    truth = setting["ways"]["undivided"]
    alike: dict[str, list[str]] = {}
    for way, row in setting["ways"].items():
        if "same_as" in row:
            alike.setdefault(row["same_as"], []).append(way)
            continue
        if way == REVERSED:
            continue
        cells = [way, f"{setting['rate']:g}", *scores(row)]
        if way == "undivided":
            cells += ["1×", "0", "the truth"]
        else:
            cells += [half_way(row, truth), largest_drift(row), verdict(row, truth)]
        lines.append(f"| {' | '.join(cells)} |")
        own = row.get("own_rate", {"runs": []})
        if own["runs"]:
            cells = [f"{way}, its own best rate", f"{own['rate']:g}", *scores(own), "", ""]
            lines.append(f"| {' | '.join([*cells, verdict(own, truth)])} |")
    tried = ", ".join(f"{float(rate):g}" for rate in setting["rates"])
    ends = [f"{', '.join(ways)}: as {other}." for other, ways in alike.items()]
    facts = [f"Rates tried: {tried}."]
    if REVERSED in setting["ways"]:
        facts.append(f"Rounding: {largest_drift(setting['ways'][REVERSED])}.")
    return [*lines, "", " ".join([*ends, *facts])]


def scores(row: dict[str, Any]) -> list[str]:
    return [
        mean_and_deviation(of_runs(row, "loss"), ".3f"),
        mean_and_deviation(of_runs(row, "metric"), ".1%"),
    ]


def largest_drift(row: dict[str, Any]) -> str:
    """Return the drift of the run that ended furthest from the undivided one."""
    far = max(of_runs(row, "drift"))
    return f"{far:.0%}" if far >= 0.01 else f"{far:.0e}" if far else "0"


def small_batch_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of batch sizes."""
    large = rows[0]
    lines = [
        "| sequences an update | best rate | held-out loss after all tokens | tokens to the loss "
        f"of {large['batch']} | time of a token | time to that loss |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        tokens = statistics.fmean(row["tokens"])
        cost = row["seconds_per_token"] / large["seconds_per_token"]
        cells = [str(row["batch"]), f"{row['rate']:g}", mean_and_deviation(row["losses"], ".3f")]
        cells += [mean_and_deviation(row["tokens"], ".0%"), f"{cost:.1f}×", f"{tokens * cost:.2f}×"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def publish(results: dict[str, Any]) -> None:
    """Write tables and plots."""
    page = PAGE.read_text(encoding="utf-8")
    for name, setting in results["settings"].items():
        page = written(page, name, table(setting))
    if "small_batch" in results:
        page = written(page, "small-batch", small_batch_table(results["small_batch"]))
    PAGE.write_text(page, encoding="utf-8")
    if results["settings"]:
        charts.draw(results, IMAGES)


def rounded(value: Any) -> Any:
    """Return results with six digits of each number."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=[*SETTINGS, "small-batch"], action="append")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the numbers")
    parser.add_argument("--draw", action="store_true", help="no training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.draw:
        publish(json.loads(options.results.read_text(encoding="utf-8")))
        return
    results: dict[str, Any] = {"settings": {}}
    if options.only and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    for name in options.only or [*SETTINGS, "small-batch"]:
        if name == "small-batch":
            results["small_batch"] = small_batch.study(SMALL_BATCH_SEEDS, CHOOSING_SEEDS[0])
        else:
            results["settings"][name] = measured(SETTINGS[name])
        options.results.write_text(json.dumps(rounded(results)) + "\n", encoding="utf-8")
    if options.results == RESULTS:
        publish(results)


if __name__ == "__main__":
    main()
