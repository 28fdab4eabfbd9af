"""Is what `tune` recommends as fast as the fastest setting there is? On CPU recipes.

    python benchmarks/tune_check.py [RECIPE ...] [--json PATH] [--markdown PATH]

`tune` searches; then everything that fits is measured, and its recommendation is held beside the
fastest, those two once more in turn in one process. Windows are timed by the processor time of
this process, which has one thread, so that it does not matter who else uses the machine. Rows of
recipes that are not named stay as they were in the files.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from wholebatch.recipes import Batches, Recipe, load_recipe
from wholebatch.tune import Limits, Setting, Tuned, tune
from wholebatch.tune.measure import Running, Subject, Timing

HERE = Path(__file__).parent
RECIPES = {
    "bytes-gpt": "bytes-gpt",
    "digits-cnn": "digits-cnn",
    "wide-mlp": str(HERE / "recipes" / "wide_mlp.py"),
}
NEEDED = 0.95
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
ROUNDS = 15


def subject_of(recipe: Recipe) -> tuple[Subject, dict[str, Any]]:
    batch_size = recipe.defaults.get("batch_size", 32)
    batches = Batches(recipe.build_data, batch_size=batch_size, seed=0, collate=recipe.collate)
    batch = batches.peek()
    options = {"units": recipe.units, "clip_norm": recipe.defaults.get("clip_norm")}

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = recipe.build_model()
        return model, recipe.build_optimizer(model, lr=None)

    subject = Subject(make, recipe.loss, lambda: batch, options, time.process_time)
    return subject, {"batch": batch, **options}


def found_by(subject: Subject, options: dict[str, Any], *, exhaustive: bool) -> Tuned:
    return tune(
        subject.make,
        loss=subject.loss,
        # Without hardware for it, bf16 takes a hundred times as long: minutes for a window.
        precisions=("full", "bf16") if HAS_BF16 else ("full",),
        limits=Limits(total=1e9, seconds=0.5, least=2 if exhaustive else 3, most=10),
        exhaustive=exhaustive,
        clock=subject.clock,
        **options,
    )


def in_turn(subject: Subject, settings: list[Setting]) -> list[float]:
    """Units per second of each, one window after the other in turn."""
    made = [Running(subject, setting) for setting in settings]
    timings = [Timing() for _ in made]
    for running in made:
        running.window()
    for _ in range(ROUNDS):
        for timing, running in zip(timings, made, strict=True):
            seconds, step = running.window()
            timing.add(seconds, step.units)
    return [timing.rate for timing in timings]


def check(name: str, path: str) -> dict[str, Any]:
    """One recipe: the search, all settings, and the two against each other."""
    recipe = load_recipe(path)
    subject, options = subject_of(recipe)
    began = time.perf_counter()
    found = found_by(subject, options, exhaustive=False)
    searched = time.perf_counter() - began
    every = found_by(subject, options, exhaustive=True)
    fastest = max(
        (trial for trial in every.trials if trial.is_measured),
        key=lambda trial: trial.units_per_second or 0.0,
    )
    settings = [found.best.setting, fastest.setting]
    ours, theirs = in_turn(subject, settings) if settings[0] != settings[1] else (1.0, 1.0)
    return {
        "recipe": name,
        "recommended": found.best.setting.said(),
        "fastest": fastest.setting.said(),
        "share": min(1.0, ours / theirs),
        "bottleneck": found.bottleneck.kind,
        "settings": len(every.trials),
        "measured_by_search": sum(trial.windows > 0 for trial in found.trials),
        "measured_in_all": sum(trial.windows > 0 for trial in every.trials),
        "search_seconds": round(searched, 1),
        "all_seconds": round(every.seconds, 1),
    }


def markdown(data: dict[str, Any]) -> str:
    lines = [
        "# Is `tune` right?",
        "",
        f"Written by `benchmarks/tune_check.py` on {data['date']}: {data['machine']}, torch "
        f"{data['torch']}, {data['threads']} thread(s).",
        "",
        f"`tune` searches; then every setting that fits is measured (micro-batch × "
        f"{'precision × ' if HAS_BF16 else ''}checkpointing, eager), and the recommendation is run "
        "in turn with the fastest of them. Timed by the processor time of one thread.",
        "",
        "| recipe | recommended | fastest of all | reaches | measured | search | all |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in data["rows"]:
        lines.append(
            f"| {row['recipe']} | {row['recommended']} | {row['fastest']} | {row['share']:.1%} | "
            f"{row['measured_by_search']} of {row['measured_in_all']} | "
            f"{row['search_seconds']} s | {row['all_seconds']} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks/tune.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/benchmarks/tune.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if given.json.exists():
        rows = {row["recipe"]: row for row in json.loads(given.json.read_text())["rows"]}
    for name in given.recipes or RECIPES:
        rows[name] = check(name, RECIPES[name])
        print(json.dumps(rows[name]), flush=True)
    data: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "rows": [rows[name] for name in RECIPES if name in rows],
    }
    given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    given.markdown.write_text(markdown(data), encoding="utf-8")
    return 0 if all(row["share"] >= NEEDED for row in data["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
