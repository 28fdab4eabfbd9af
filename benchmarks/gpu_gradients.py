"""Device memory and time of a window by where its gradients go, on one CUDA device.

    python benchmarks/gpu_gradients.py                       # the table of docs/gradients.md
    python benchmarks/gpu_gradients.py --rows host-1 plain-1 # some rows
    python benchmarks/gpu_gradients.py --model gpt-124m --rows graph --budget 60   # in graphs
    python benchmarks/gpu_gradients.py --model gpt-tiny      # tries the program out, on a CPU too
    python benchmarks/gpu_gradients.py --tables              # gradients.md from its json again

The link and the addition on the host are measured first, by themselves. Rows then run one after the
other in one process, in the order of `--rows`; each is printed as it comes, with what it comes to
beside its aim. A row in graphs is measured in windows of two lengths. After `--budget` seconds the
micro-batch that runs is the last: a row with a window measured keeps it. Everything is written to
gradients.json and .md in `--out` (docs/benchmarks), row by row.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from wholebatch.options import grouped

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from speed.device_time import mark, milliseconds  # noqa: E402
from speed.models import CASES, summed  # noqa: E402

import wholebatch as wb  # noqa: E402
from wholebatch.offload import transfer_to_host as transfer  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
GIB = 2.0**30
BF16, FP32 = "bf16", "fp32"


@dataclass(frozen=True)
class Row:
    """One way to keep gradients, at one micro-batch."""

    gradients: str
    micro: int
    parameters: str
    samples: int = 0
    optimizer_on: str = "device"
    windows: int = 2
    beside: str = ""
    """The row that it is compared with."""
    execute: str = "eager"
    long: int = 0
    """Samples of the longer windows that are measured too."""


def rows(large: int) -> dict[str, Row]:
    """`large`: a micro-batch whose computation covers the link and the host's addition."""
    few = 4
    return {
        "plain-1": Row("device", 1, BF16),
        "host-1": Row("host", 1, BF16, beside="plain-1", windows=1),
        "swap-1": Row("swap", 1, BF16, beside="plain-1"),
        "plain-large": Row("device", large, BF16, windows=3),
        "host-large": Row("host", large, BF16, beside="plain-large", windows=3),
        "autocast-plain-1": Row("device", 1, FP32),
        "autocast-moments-1": Row("moments", 1, FP32, beside="autocast-plain-1"),
        "autocast-swap-1": Row("swap", 1, FP32, beside="autocast-plain-1"),
        "autocast-plain-large": Row("device", large, FP32, windows=3),
        "autocast-host-large": Row("host", large, FP32, beside="autocast-plain-large", windows=3),
        "plain-once": Row("device", few, FP32, samples=few, windows=4),
        "release-once": Row("release", few, FP32, samples=few, beside="plain-once", windows=4),
        **{
            f"graph-{name}": Row(
                name.replace("plain", "device"),
                4,
                FP32,
                beside="" if name == "plain" else "graph-plain",
                execute="graph",
                windows=8,
                long=256,
            )
            for name in ("plain", "swap", "release")
        },
        "host-in-graph": Row("host", 4, FP32, beside="graph-plain", execute="graph"),
        "host-step": Row("host", large, BF16, optimizer_on="host", beside="plain-large", windows=2),
    }


AIMS: dict[str, list[tuple[str, str, float]]] = {
    "host-1": [
        ("allocated_saved_of_gradients", "gradient bytes saved on the device", 0.95),
        ("times_largest_limit", "the largest of plain window, link and host's addition", 1.25),
    ],
    "host-large": [("times_plain", "the plain window, where compute covers both", 1.25)],
    "autocast-moments-1": [
        ("allocated_saved_of_gradients", "gradient bytes saved on the device", 0.90),
        ("times_plain", "the plain window in the same execution mode", 1.2),
    ],
    **{
        f"graph-{gradients}": [
            ("times_plain", "the plain window in graphs", 1.03),
            ("long_times_plain", "it in longer windows", 1.03),
        ]
        for gradients in ("swap", "release")
    },
    "swap-1": [("allocated_saved_of_gradients", "gradient bytes saved on the device", 0.95)],
}
"""What a row must show: a share that is to be at least so large, or a time at most so long."""


def aims(name: str, row: dict[str, Any]) -> list[str]:
    """The figures that a row is made for, each with its limit and whether it is kept."""
    lines = []
    for key, what, limit in AIMS.get(name, []):
        if key not in row:
            continue
        share = key.endswith("of_gradients")
        value = row[key]
        kept = value >= limit if share else value <= limit
        shown = f"{value:.1%}" if share else f"{value:.2f}x"
        bound = f"at least {limit:.0%}" if share else f"at most {limit:.2f}x"
        verdict = "kept" if kept else "MISSED"
        lines.append(f"{verdict}: {shown} {'of the' if share else 'of'} {what} ({bound})")
    return lines


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Found:
    """What was measured, written after every row."""

    def __init__(self, out: Path, model: str) -> None:
        self._file = out / "gradients.json"
        self.rows: dict[str, dict[str, Any]] = {}
        self.machine: dict[str, Any] = {
            "model": model,
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name() if HAS_CUDA else "CPU",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        left_out = {"all_seconds", "losses", *Row.__dataclass_fields__}
        short = {key: _short(value) for key, value in row.items() if key not in left_out}
        print(f"{name}: {json.dumps(short)}", flush=True)
        for line in aims(name, row):
            print(f"  {line}", flush=True)
        self.write()

    def tell(self, **numbers: Any) -> None:
        self.machine.update(numbers)
        print(json.dumps(numbers), flush=True)
        self.write()

    def write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1)
        self._file.write_text(text + "\n", encoding="utf-8")


def link(found: Found, nbytes: int) -> None:
    """Bytes per second between pinned memory and the device, each way by itself."""
    if not HAS_CUDA:
        return
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    speeds = {}
    for way, target, source in (("to_host", host, device), ("to_device", device, host)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        speeds[f"{way}_gb_per_s"] = 4 * nbytes / (time.perf_counter() - began) / 1e9
    found.tell(**speeds)


def addition(found: Found, elements: int) -> None:
    """Elements per second that the host adds into fp32, in pieces that its cache may hold."""
    total = torch.zeros(elements)
    for name, dtype in ((BF16, torch.bfloat16), (FP32, torch.float32)):
        ring = torch.zeros(2**22, dtype=dtype, pin_memory=HAS_CUDA)

        def once(ring: Tensor = ring) -> None:
            for piece in total.split(ring.numel()):
                transfer.add_on_host(piece, ring[: piece.numel()], first=False)

        once()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            once()
            times.append(time.perf_counter() - began)
        found.tell(**{f"host_adds_{name}_g_per_s": elements / min(times) / 1e9})


def free() -> None:
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()


def driver_bytes() -> int:
    """What the driver says is taken on the device, by whomever."""
    if not HAS_CUDA:
        return 0
    left, total = torch.cuda.mem_get_info()
    return int(total - left)


@dataclass
class Windows:
    """Windows of one row; TimeoutError: the time is over before one has ended."""

    train: wb.WholeBatch
    until: float
    losses: list[float] = field(default_factory=list)

    def _in_time(self, done: int, of: int) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError(f"no time left in micro-batch {done} of {of}")

    def seconds(self, batch: Any, number: int) -> list[float]:
        """Return the seconds of each of so many windows, by the device's clock."""
        marks = [mark()]
        for _ in range(number):
            try:
                self.losses.append(self.train.step(batch, after_micro=self._in_time).loss)
            except TimeoutError:
                if len(marks) == 1:
                    raise
                break
            marks.append(mark())
        return [ms / 1000 for ms in milliseconds(marks)]


def measured(case_name: str, row: Row, until: float) -> dict[str, Any]:
    """The row's figures, from the windows that end before `until`; TimeoutError: none does."""
    case = CASES[case_name]
    free()
    before = driver_bytes()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: nn.Module = case.build()
    if row.parameters == BF16:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    samples = row.samples or case.window
    batch = default_collate([case.sample(i) for i in range(max(samples, row.long))])
    batch, longer = {name: leaf[:samples] for name, leaf in batch.items()}, batch
    options: dict[str, Any] = {"gradients": row.gradients, "optimizer_on": row.optimizer_on}
    if row.gradients == "release":
        options["nonfinite"] = "skip"
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=summed,
        units=lambda micro: micro["y"].numel(),
        precision="full" if row.parameters == BF16 else "bf16",
        execute=row.execute,  # type: ignore[arg-type]
        **grouped({"micro_batch": min(row.micro, samples), **options}),
    )
    windows = Windows(train, until)
    # In graphs: release prepares in its second window, and a third lets the clocks come up.
    first = sum(windows.seconds(batch, 3 if row.execute == "graph" else 1))
    if HAS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    out_before = getattr(train._window.store, "bytes_out", 0)
    times = windows.seconds(batch, row.windows)
    out = (getattr(train._window.store, "bytes_out", 0) - out_before) / len(times)
    parameters = sum(p.numel() for p in model.parameters())
    found = {
        **asdict(row),
        "seconds": statistics.median(times),
        "all_seconds": times,
        "first_seconds": first,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if HAS_CUDA else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if HAS_CUDA else 0.0,
        "driver_gib": (driver_bytes() - before) / GIB,
        "gradient_gib": 4 * parameters / GIB,
        "numbers": parameters,
        "micro_batches": -(-samples // min(row.micro, samples)),
        "mode": train._runner.executor.mode,
        "recoveries": train.recoveries,
        "bytes_out": out,
        "host_gib": getattr(train._window.store, "host_bytes", 0) / GIB,
        "losses": windows.losses,
    }
    if row.long:
        with suppress(TimeoutError):
            found["long_seconds"] = statistics.median(windows.seconds(longer, 3))
    del train, windows, model, optimizer
    free()
    return found


def judged(machine: dict[str, Any], all_rows: dict[str, dict[str, Any]], name: str) -> None:
    """Add to a row what it comes to beside the one that it is compared with."""
    row = all_rows[name]
    beside = all_rows.get(row["beside"])
    if beside is None:
        return
    limits = [beside["seconds"]]
    if row["gradients"] == "host" and "to_host_gb_per_s" in machine:
        added = row["numbers"] * row["micro_batches"]
        limits.append(row["bytes_out"] / machine["to_host_gb_per_s"] / 1e9)
        limits.append(added / machine["host_adds_fp32_g_per_s"] / 1e9)
    row["limits"] = limits
    row["times_largest_limit"] = row["seconds"] / max(limits)
    row["times_plain"] = row["seconds"] / beside["seconds"]
    if "long_seconds" in row.keys() & beside.keys():
        row["long_times_plain"] = row["long_seconds"] / beside["long_seconds"]
    pairs = zip(row["losses"], beside["losses"], strict=False)
    row["losses_off"] = max(abs(a - b) / abs(b) for a, b in pairs)
    for kind in ("allocated", "driver") if HAS_CUDA else ():
        saved = beside[f"{kind}_gib"] - row[f"{kind}_gib"]
        row[f"{kind}_saved_of_gradients"] = saved / row["gradient_gib"]


def page(data: dict[str, Any]) -> str:
    """The table, in Markdown."""
    machine = data["machine"]
    lines = [
        "# Where gradients go: time and memory",
        "",
        f"Written by `benchmarks/gpu_gradients.py` on {machine['date']}. "
        f"{' '.join(machine.get('notes', []))}".rstrip(),
        "",
        "| gradients | parameters | micro-batch | s per window | beside plain | of the largest "
        "limit | device memory | gradients saved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"].values():
        if "error" in row:
            continue
        host_step = ', optimizer_on="host"' if row["optimizer_on"] == "host" else ""
        saved = row.get("allocated_saved_of_gradients")
        lines.append(
            f'| `"{row["gradients"]}"`{host_step} | {row["parameters"]} | {row["micro"]} of '
            f"{row['samples'] or machine['window']} | {row['seconds']:.2f} | "
            + (f"{row['times_plain']:.2f}×" if "times_plain" in row else "")
            + " | "
            + (f"{row['times_largest_limit']:.2f}×" if len(row.get("limits", ())) > 1 else "")
            + f" | {row['allocated_gib']:.1f} GiB | "
            + (f"{saved:.0%} of {row['gradient_gib']:.1f} GiB" if saved is not None else "")
            + " |"
        )
    facts = [
        f"{machine['device']}, torch {machine['torch']}, {machine['threads']} host threads.",
        f"Link {machine.get('to_host_gb_per_s', 0):.1f} GB/s to the host, "
        f"{machine.get('to_device_gb_per_s', 0):.1f} GB/s back; the host adds "
        f"{machine['host_adds_fp32_g_per_s']:.1f} G fp32 numbers a second into fp32 sums "
        f"({machine['host_adds_bf16_g_per_s']:.1f} G where it has to widen bf16 itself).",
    ]
    return "\n".join([*lines, "", " ".join(facts), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt-1.3b", choices=sorted(CASES))
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--large", type=int, default=16)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    page_file = options.out / "gradients.md"
    if options.tables:
        data = json.loads((options.out / "gradients.json").read_text(encoding="utf-8"))
        page_file.write_text(page(data), encoding="utf-8")
        return 0
    began, case = time.monotonic(), CASES[options.model]
    known = rows(min(options.large, case.window))
    wanted = [*(options.rows or known)]
    if wanted == ["graph"]:
        wanted = [name for name in known if name.startswith("graph-")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--rows {' '.join(unknown)}: must be graph, or of {', '.join(known)}")
    found = Found(options.out, options.model)
    found.tell(window=case.window, large=min(options.large, case.window))
    size = 2 ** {"gpt-1.3b": 29, "gpt-124m": 26}.get(options.model, 20)
    link(found, 2 * size)
    addition(found, size)
    until = began + options.budget
    for name in wanted:
        if time.monotonic() > until:
            print(f"{name}: no time left", flush=True)
            continue
        try:
            result = measured(options.model, known[name], until)
        except Exception as problem:
            result = {"error": f"{type(problem).__name__}: {str(problem)[:300]}", "beside": ""}
            free()
        else:
            found.rows[name] = result
            judged(found.machine, found.rows, name)
        found.add(name, result)
        print(f"after {time.monotonic() - began:.0f} s", flush=True)
    text = page({"machine": found.machine, "rows": found.rows})
    page_file.write_text(text, encoding="utf-8")
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
