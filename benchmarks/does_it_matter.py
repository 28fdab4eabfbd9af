"""Does an exact update make a better model? Tables and plots of docs/does-it-matter.md.

    python benchmarks/does_it_matter.py                # all settings
    python benchmarks/does_it_matter.py --only sft     # one of them: to try, nothing is written
    python benchmarks/does_it_matter.py --draw         # tables and plots of the saved results

Each setting is trained with the same data order, seeds and learning rate: with the undivided batch
(the truth), by the usual loop, by each trainer's own accumulation, and by wholebatch. The learning
rate is chosen before, by the undivided batch alone: the best of six, with a seed that the study
does not use. A trainer whose first run ends with the weights of the undivided batch or of the usual
loop is not run again.
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
from which_mean import written  # noqa: E402

RESULTS = ROOT / "docs" / "benchmarks" / "does_it_matter.json"
PAGE = ROOT / "docs" / "does-it-matter.md"
IMAGES = ROOT / "docs" / "images"
SEEDS = range(3)
CHOOSING_SEED = 100
"""The seed with which the learning rates are chosen."""
POINTS = 12
REVERSED = "undivided, other order"
"""The way whose drift is rounding alone."""
SAME = 0.001
"""Weights that drift less than this, as a share of the way, are those of another run."""
TRAINERS = ("Accelerate", "Lightning", "HF Trainer", "exact(Trainer)")


def drift(result: dict[str, Any], truth: dict[str, Any]) -> float:
    """How far apart the last weights are, as a share of the way that the truth went."""
    way = (truth["after"] - truth["before"]).norm()
    return float((result["after"] - truth["after"]).norm() / way)


def losses_by_rate(setting: Setting) -> dict[float, float]:
    """Return the held-out loss of the undivided batch for each learning rate."""
    return {
        rate: run(setting.task(CHOOSING_SEED, rate), "undivided", CHOOSING_SEED, points=1)["loss"]
        for rate in setting.rates
    }


def measured(setting: Setting) -> dict[str, Any]:
    """Choose the learning rate of a setting, and train it in all ways."""
    tried = losses_by_rate(setting)
    rate = min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
    print(f"{setting.title}: {tried}, so {rate}", flush=True)
    rows: dict[str, Any] = {}
    for seed in SEEDS:
        results: dict[str, Any] = {}
        for way in ways_of(setting.task(seed, rate)):
            if seed > 0 and rows[way].get("same_as"):
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
    about = {"title": setting.title, "metric": setting.metric, "units": setting.units}
    return {**about, "rate": rate, "rates": tried, "ways": rows}


def spread(values: list[float], form: str) -> str:
    """Return mean ± standard deviation, or the value of a single run."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form)}"


def of_runs(row: dict[str, Any], name: str) -> list[float]:
    return [float(one[name]) for one in row["runs"]]


def verdict(row: dict[str, Any], truth: dict[str, Any]) -> str:
    """Say whether the held-out loss differs by more than the seeds do, and which way."""
    pairs = zip(of_runs(row, "loss"), of_runs(truth, "loss"), strict=False)
    apart = [mine - right for mine, right in pairs]
    mean = statistics.fmean(apart)
    if not math.isfinite(mean):
        return "diverged"
    noise = statistics.stdev(of_runs(truth, "loss"))
    if abs(mean) <= noise / 10:
        return "none"
    size = "less than between seeds" if abs(mean) <= noise else "more than between seeds"
    return f"{mean:+.3f}: {size}"


def half_way(row: dict[str, Any], truth: dict[str, Any]) -> str:
    """Say how many samples a way needs to the loss that the truth has after half of its samples.

    The answer is a multiple of what the truth needs to first reach it.
    """
    shares = []
    for run_of_way, run_of_truth in zip(row["runs"], truth["runs"], strict=False):
        curve = run_of_truth["curve"]
        goal = min(curve, key=lambda point: abs(point[0] - curve[-1][0] / 2))[1]
        needed = small_batch.tokens_to(run_of_truth["curve"], goal)
        if needed == 0:  # The truth ends no better than it begins.
            return "–"
        shares.append(small_batch.tokens_to(run_of_way["curve"], goal) / needed)
    missing = sum(map(math.isinf, shares))
    if missing:
        return f"never in {missing} of {len(shares)}"
    return f"{statistics.fmean(shares):.2f}× ± {statistics.stdev(shares):.2f}"


def table(setting: dict[str, Any]) -> list[str]:
    """Return the lines of one setting's table."""
    tried = ", ".join(f"{float(rate):g}" for rate in setting["rates"])
    lines = [
        f"| | held-out loss | {setting['metric']} | samples to half-way | weights drift by "
        "| difference in loss |",
        "|---|---:|---:|---:|---:|---|",
    ]
    truth = setting["ways"]["undivided"]
    alike: dict[str, list[str]] = {}
    for way, row in setting["ways"].items():
        if "same_as" in row:
            alike.setdefault(row["same_as"], []).append(way)
            continue
        if way == REVERSED:
            continue
        cells = [way, spread(of_runs(row, "loss"), ".3f"), spread(of_runs(row, "metric"), ".1%")]
        if way == "undivided":
            cells += ["1×", "0", "the truth"]
        else:
            cells += [half_way(row, truth), largest_drift(row), verdict(row, truth)]
        lines.append(f"| {' | '.join(cells)} |")
    ends = [f"{', '.join(ways)}: as {other}." for other, ways in alike.items()]
    facts = [f"Rate {setting['rate']:g}, of {tried}."]
    if REVERSED in setting["ways"]:
        facts.append(f"Rounding: {largest_drift(setting['ways'][REVERSED])}.")
    return [*lines, "", " ".join([*ends, *facts])]


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
        cells = [str(row["batch"]), f"{row['rate']:g}", spread(row["losses"], ".3f")]
        cells += [spread(row["tokens"], ".0%"), f"{cost:.1f}×", f"{tokens * cost:.2f}×"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def publish(results: dict[str, Any]) -> None:
    """Write tables and plots."""
    page = PAGE.read_text(encoding="utf-8")
    for name, setting in results["settings"].items():
        page = written(page, name, ["", *table(setting), ""])
    if "small_batch" in results:
        lines = ["", *small_batch_table(results["small_batch"]), ""]
        page = written(page, "small-batch", lines)
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
    parser.add_argument("--draw", action="store_true", help="no training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.draw:
        publish(json.loads(RESULTS.read_text(encoding="utf-8")))
        return
    results: dict[str, Any] = {"settings": {}}
    for name in options.only or [*SETTINGS, "small-batch"]:
        if name == "small-batch":
            results["small_batch"] = small_batch.study(SEEDS, CHOOSING_SEED)
        else:
            results["settings"][name] = measured(SETTINGS[name])
        results["about"] = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "seconds": round(time.process_time()),
        }
        if not options.only:  # One run writes all of it.
            RESULTS.write_text(json.dumps(rounded(results)) + "\n", encoding="utf-8")
    if not options.only:
        publish(results)


if __name__ == "__main__":
    main()
