"""The loss of bytes-gpt with the exact update and with Adam accumulation, update by update.

    python benchmarks/adam_accumulation.py                 # 200 updates of both, on this device
    python benchmarks/adam_accumulation.py --plot          # the plot from the numbers again

Same weights, same batches, no clipping (Adam accumulation has no whole gradient to clip). The loss
of the last 20 updates is compared. Writes docs/benchmarks/adam_accumulation.json and the plot
docs/images/adam-accumulation.svg (where matplotlib is installed).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import wholebatch as wb  # noqa: E402
from wholebatch.recipes import bytes_gpt  # noqa: E402

LAST = 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def losses(gradients: str, *, updates: int, samples: int, micro: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = bytes_gpt.model().to(DEVICE)
    data = bytes_gpt.data()
    optimizer = bytes_gpt.optimizer(model)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=bytes_gpt.loss,
        units=bytes_gpt.units,
        # The exact update is the same for any micro-batch: the whole batch is the fastest.
        micro_batch=micro if gradients == "moments" else samples,
        scheduler=bytes_gpt.scheduler(optimizer, updates),
        gradients=gradients,  # type: ignore[arg-type]
        execute="eager",
        audit=False,
    )
    order = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(updates):
        places = torch.randint(0, len(data), (samples,), generator=order).tolist()
        found.append(train.step(default_collate([data[place] for place in places])).loss)
    return found


def plot(found: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name, colour in (("exact", "#1b6ca8"), ("moments", "#d1495b")):
        label = "exact update" if name == "exact" else "Adam accumulation"
        axes.plot(range(1, len(found[name]) + 1), found[name], color=colour, label=label, lw=1.2)
    axes.set_xlabel("update")
    axes.set_ylabel("loss of the batch (nats per byte)")
    axes.set_title(
        f"bytes-gpt, batches of {found['samples']} in micro-batches of {found['micro']}", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--plot", action="store_true", help="only draw the numbers again")
    options = parser.parse_args()
    file = options.out / "benchmarks" / "adam_accumulation.json"
    image = options.out / "images" / "adam-accumulation.svg"
    if not options.plot:
        setting = {"samples": options.samples, "micro": options.micro, "seed": options.seed}
        found: dict[str, Any] = {**setting, "device": DEVICE, "torch": torch.__version__}
        for name, gradients in (("exact", "device"), ("moments", "moments")):
            began = time.perf_counter()
            found[name] = losses(gradients, updates=options.updates, **setting)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        ends = {name: statistics.fmean(found[name][-LAST:]) for name in ("exact", "moments")}
        found["last"] = ends
        found["difference"] = ends["moments"] / ends["exact"] - 1.0
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    data = json.loads(file.read_text(encoding="utf-8"))
    print(
        f"mean loss of the last {LAST} updates: exact {data['last']['exact']:.4f}, "
        f"Adam accumulation {data['last']['moments']:.4f} ({data['difference']:+.2%})"
    )
    if importlib.util.find_spec("matplotlib"):
        plot(data, image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
