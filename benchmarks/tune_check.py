"""Is what `tune` recommends as fast as the fastest setting there is? On CPU recipes.

    python benchmarks/tune_check.py [RECIPE ...] [--rounds N] [--json PATH] [--markdown PATH]

`tune` searches. Then, without it, every setting there is (each size of micro-batches, with and
without checkpointing) makes windows in turn in one process, by the clock on the wall: one round of
all, then of those that were not far behind. The recommendation is compared with the fastest of them
within the same rounds, so that what else the machine does comes over both alike. One thread. Rows
of recipes that are not named stay as they were in the files.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch

from wholebatch.cli.recipes.recipe import Recipe, load_recipe
from wholebatch.cli.recipes.recipe_batches import Batches
from wholebatch.tune import Limits, Setting, tune
from wholebatch.tune.setting_measurements import Running
from wholebatch.tune.settings import modes_of, sizes_of
from wholebatch.tune.window_timing import Turns, Workload

HERE = Path(__file__).parent
RECIPES = {
    "bytes-gpt": "bytes-gpt",
    "digits-cnn": "digits-cnn",
    "wide-mlp": str(HERE / "recipes" / "wide_mlp.py"),
}
NEEDED = 0.95
FAR = 1.15
"""Times the fastest of a round: a setting that was always slower is left out of the next ones."""
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
# Without hardware for it, bf16 takes a hundred times as long: minutes for a window.
PRECISIONS = ("full", "bf16") if HAS_BF16 else ("full",)


def subject_of(recipe: Recipe) -> tuple[Workload, int]:
    """The recipe's batches as they come, with their fetching, as `wholebatch tune` has them."""
    batch_size = recipe.defaults.get("batch_size", 32)
    batches = Batches(recipe.build_data, batch_size=batch_size, seed=0, collate=recipe.collate)
    options = {"units": recipe.units, "clip_norm": recipe.defaults.get("clip_norm")}
    whole = None if batches.length is None else batches.length // batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch
        return batches.take()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = recipe.build_model()
        return model, recipe.build_optimizer(model, lr=None)

    return Workload(make, recipe.loss, take, options), batch_size


def every_setting(workload: Workload, samples: int) -> list[Setting]:
    """All there are, whatever a search would think of them."""
    modes = modes_of(workload.make()[0], PRECISIONS, ("eager",), ("auto",), (False, True))
    return [Setting(size, mode) for mode in modes for size in sizes_of(samples)]


def compared(workload: Workload, settings: list[Setting], keep: Setting, rounds: int) -> Turns:
    """All settings in turn; after a round those that were far behind in every one are left out.

    The rounds that are given back are of those that stayed: `keep` is one of them.
    """
    made = [Running(workload, setting) for setting in settings]
    behind = dict.fromkeys(settings, math.inf)
    for at in range(3):
        turns = Turns(workload, made)
        turns.round()
        if at == 0:
            turns.round()  # the first windows of all have something to do that others have not
        fastest = min(turns.rounds[-1])
        for running, seconds in zip(made, turns.rounds[-1], strict=True):
            behind[running.setting] = min(behind[running.setting], seconds / fastest)
        stays = [r for r in made if behind[r.setting] < FAR or r.setting == keep]
        for running in made:
            if running not in stays:
                running.close()
        made = stays
        if len(made) == 1:
            break
    turns = Turns(workload, made)
    for _ in range(rounds):
        turns.round()
    return turns


def check(name: str, path: str, rounds: int) -> dict[str, Any]:
    """One recipe: the search, then all settings in turn."""
    recipe = load_recipe(path)
    workload, samples = subject_of(recipe)
    began = time.perf_counter()
    found = tune(
        workload.make,
        loss=workload.loss,
        batches=workload.batches,
        precisions=PRECISIONS,
        limits=Limits(total=1e9),
        **workload.options,
    )
    searched = time.perf_counter()
    settings = every_setting(workload, samples)
    turns = compared(workload, settings, found.best.setting, rounds)
    left = [running.setting for running in turns.made if isinstance(running, Running)]
    ours = left.index(found.best.setting)
    fastest = max(range(len(left)), key=lambda at: turns.ratio(at, ours).median)
    share = turns.ratio(ours, fastest)
    return {
        "recipe": name,
        "recommended": found.best.setting.said(),
        "fastest": left[fastest].said(),
        "share": share.median,
        "interval": [share.low, share.high],
        "bottleneck": found.bottleneck.kind,
        "measured_by_search": sum(trial.windows > 0 for trial in found.trials),
        "measured_in_all": len(settings),
        "search_seconds": round(searched - began, 1),
        "all_seconds": round(time.perf_counter() - searched, 1),
    }


def markdown(data: dict[str, Any]) -> str:
    lines = [
        "# Is `tune` right?",
        "",
        f"Written by `benchmarks/tune_check.py` on {data['date']}: {data['machine']}, torch "
        f"{data['torch']}, {data['threads']} thread(s), by the clock on the wall.",
        "",
        "`tune` searches; then every setting there is (micro-batch × "
        f"{'precision × ' if HAS_BF16 else ''}checkpointing, eager) makes windows in turn, and the "
        "recommendation is compared with the fastest of them: the median over the rounds, with its "
        "95% interval.",
        "",
        "| recipe | recommended | fastest of all | reaches | measured | search | all |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in data["rows"]:
        lines.append(
            f"| {row['recipe']} | {row['recommended']} | {row['fastest']} | {_share(row)} | "
            f"{row['measured_by_search']} of {row['measured_in_all']} | "
            f"{row['search_seconds']} s | {row['all_seconds']} s |"
        )
    return "\n".join(lines) + "\n"


def _share(row: dict[str, Any]) -> str:
    if row["recommended"] == row["fastest"]:
        return "it is the fastest"
    low, high = row["interval"]
    return f"{row['share']:.1%} ({low:.1%} to {high:.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks/tune.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/benchmarks/tune.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if given.json.exists():
        rows = {row["recipe"]: row for row in json.loads(given.json.read_text())["rows"]}
    for name in given.recipes or RECIPES:
        rows[name] = check(name, RECIPES[name], given.rounds)
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
