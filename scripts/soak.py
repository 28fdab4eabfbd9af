"""Soak: windows by the thousand with faults drawn at random, that end with the bits of none.

    python scripts/soak.py [--windows 20000] [--seed 0] [--no-ranks] [--json FILE] [--markdown FILE]

Nine tenths of the windows run in one process, the rest on two gloo ranks under torchrun. Faults
are drawn from the seed: out of memory in a forward, a backward or the step, a NaN, SIGTERM,
SIGKILL, a disk that is full at a checkpoint, a slow rank, a newest checkpoint that is cut short. A
run that was ended by one is resumed, again and again. At the end the model, the optimizer, the
place in the data and every line of metrics.jsonl must be those of a run without faults, bit for
bit. Exits with 1 if they are not, or if a run ended by something that was not injected.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wholebatch
from wholebatch.cli import main as command
from wholebatch.cli import training_run as session  # noqa: F401 - imported here once, for all that is forked
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.cli.report.metrics_writers import (
    TIMING,
    Events,  # noqa: F401
)

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("soak_recipe.py")
CUT = "newest checkpoint cut short"
OF_RANKS = 0.1  # of the windows
MAY_END_BY = {
    1: ("out of memory in the step", "NaN", "full disk at a checkpoint"),
    130: ("SIGTERM",),
    -9: ("SIGKILL",),
}


class Progress:
    """One line: windows done of all, how fast, faults so far, time left."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._told = time.monotonic()
        self.faults: Counter[str] = Counter()

    def add(self, windows: int) -> None:
        """These are done for good."""
        self._done += windows

    def tell(self, stage: str, here: int) -> None:
        """At most every second in a terminal, else every half minute."""
        now, shows = time.monotonic(), sys.stdout.isatty()
        if now - self._told < (1 if shows else 30):
            return
        self._told = now
        done = self._done + here
        rate = done / (now - self._began)
        left = (self._total - done) / rate if rate else 0
        line = (
            f"{stage}: {done:,} of {self._total:,} windows, {rate:.0f}/s, "
            f"{sum(self.faults.values())} faults, {left / 60:.0f} min left"
        )
        print(f"\r{line:<79}" if shows else line, end="" if shows else "\n", flush=True)


def forked(arguments: list[str], log: Path, wait: Callable[[], None], **environment: str) -> int:
    """`wholebatch ARGUMENTS` in a copy of this process, which has everything imported."""
    process = os.fork()
    if process == 0:
        os.environ.update(environment)
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        status = 70
        try:
            status = command(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        wait()
        time.sleep(0.02)


def windows_of(run: Path) -> int:
    """The window of the last whole line of metrics.jsonl, read from its end."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["window"])
    except (OSError, ValueError, IndexError):
        return 0


def _train(out: Path, windows: int) -> list[str]:
    # The noise scale is estimated from micro-batches: it depends on how a window was cut.
    options = ["--out", str(out), "--steps", str(windows), "--noise", "off"]
    return ["train", str(RECIPE), *options]


def straight(out: Path, windows: int, progress: Progress) -> None:
    """The run without faults that the others are compared with."""
    status = forked(
        _train(out, windows),
        out.with_suffix(".log"),
        lambda: progress.tell("without faults", windows_of(out)),
    )
    if status:
        raise SystemExit(f"the run without faults ended with {status}: {_tail(out)}")
    progress.add(windows)


def in_one_process(out: Path, windows: int, seed: int, progress: Progress) -> Counter[str]:
    """A run with faults, resumed until it is done."""
    draw, faults = random.Random(seed), out.with_suffix(".faults")
    counted: Counter[str] = Counter()
    for attempt in range(10_000):
        before = _read(faults)
        progress.faults = Counter(before) + counted
        status = forked(
            [*_train(out, windows), "--auto-resume"],
            out.with_suffix(".log"),
            lambda: progress.tell("one process", windows_of(out)),
            SOAK_FAULTS=str(faults),
            SOAK_DRAW=f"{seed} {attempt}",
        )
        if status == 0:
            progress.add(windows)
            progress.faults = Counter(_read(faults)) + counted
            return progress.faults
        new = _read(faults)[len(before) :]
        if not any(name in MAY_END_BY.get(status, ()) for name in new):
            raise SystemExit(f"ended with {status}, by none of {new[-3:]}: {_tail(out)}")
        counted["resumed"] += 1
        if draw.random() < 0.4 and _cut(out, draw):
            counted[CUT] += 1
    raise SystemExit(f"not done after 10,000 attempts: {_tail(out)}")


def on_ranks(out: Path, windows: int, seed: int, progress: Progress) -> Counter[str]:
    """Two ranks; torchrun starts them again after every fault."""
    faults, log = out.with_suffix(".faults"), out.with_suffix(".log")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "SOAK_FAULTS": str(faults),
        "SOAK_DRAW": f"{seed} ranks",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "--max-restarts", "10000", "-m", "wholebatch.cli"]
    launch += [*_train(out, windows), "--checkpoint-every", "10"]
    with log.open("wb") as file:
        running = subprocess.Popen(launch, env=environment, stdout=file, stderr=file)
    try:
        before = progress.faults
        while running.poll() is None:
            progress.faults = before + Counter(_read(faults))
            progress.tell("two ranks", windows_of(out))
            time.sleep(0.2)
    finally:
        running.terminate()  # torchrun ends its workers
    if running.wait():
        raise SystemExit(f"two ranks ended with {running.returncode}: {_tail(out)}")
    progress.add(windows)
    counted = Counter(_read(faults))
    counted["resumed"] = log.read_text(errors="replace").count("  resumed  after update")
    return counted


def differences(run: Path, reference: Path) -> list[str]:
    """The names of what differs in the last checkpoint and in the metrics."""
    ours, theirs = (Checkpoints(one / "checkpoints").load().state for one in (run, reference))
    found = [part for part in ("model", "optimizer", "data") if not _same(ours[part], theirs[part])]
    if _metrics(run) != _metrics(reference):
        found.append("metrics.jsonl")
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    """What a window was, not how it was made: out of memory cuts micro-batches."""
    apart = TIMING | {"micro_batches"}
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in apart} for line in lines]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _read(faults: Path) -> list[str]:
    return faults.read_text().splitlines() if faults.exists() else []


def _cut(run: Path, draw: random.Random) -> bool:
    """Cut the newest checkpoint short, where there is another to go back to."""
    paths = Checkpoints(run / "checkpoints").paths()
    if len(paths) < 2:
        return False
    os.truncate(paths[-1], draw.randrange(paths[-1].stat().st_size))
    return True


def _tail(out: Path) -> str:
    return out.with_suffix(".log").read_text(errors="replace")[-2000:]


def soak(windows: int, seed: int, *, ranks: bool, place: Path) -> dict[str, Any]:
    """Run everything in a folder, and return what is written down."""
    parts = {"one process": windows - int(OF_RANKS * windows) * ranks}
    if ranks:
        parts["two gloo ranks (torchrun)"] = int(OF_RANKS * windows)
    progress, began, rows = Progress(2 * sum(parts.values())), time.monotonic(), []
    for number, (name, count) in enumerate(parts.items()):
        reference, out = place / f"straight-{number}", place / f"faults-{number}"
        straight(reference, count, progress)
        run = in_one_process if number == 0 else on_ranks
        faults = run(out, count, seed, progress)
        differs = differences(out, reference)
        rows.append(
            {
                "part": name,
                "windows": count,
                "faults": dict(sorted(faults.items())),
                "differs": differs,
                "bit_identical": not differs,
            }
        )
        told = "bit-identical" if not differs else f"DIFFERS in {', '.join(differs)}"
        injected = sum(faults.values()) - faults["resumed"]
        print(f"{name}: {count:,} windows, {injected} faults, {faults['resumed']} resumes: {told}")
    return {
        "benchmark": "soak",
        "date": time.strftime("%Y-%m-%d"),
        "seed": seed,
        "windows": windows,
        "seconds": round(time.monotonic() - began),
        "versions": {
            "wholebatch": wholebatch.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "cores": os.cpu_count(),
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    """The page: what was run, and every fault by its count."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = found["rows"]
    names = sorted({name for row in parts for name in row["faults"]} - {"resumed"})
    lines = [
        "# Soak",
        "",
        f"{found['windows']:,} windows with faults drawn at random (seed {found['seed']}), and the "
        "same without; written by `make soak`.",
        f"{found['date']}, {versions}, {found['cores']} cores, "
        f"{found['seconds'] / 60:.0f} minutes.",
        "",
        "| | " + " | ".join(row["part"] for row in parts) + " |",
        "|---|" + "---:|" * len(parts),
        "| windows | " + " | ".join(f"{row['windows']:,}" for row in parts) + " |",
    ]
    for name in [*names, "resumed"]:
        counts = " | ".join(str(row["faults"].get(name, 0)) for row in parts)
        lines.append(f"| {name} | {counts} |")
    ends = " | ".join(
        "**bit-identical**" if row["bit_identical"] else f"differs: {', '.join(row['differs'])}"
        for row in parts
    )
    lines += [
        f"| at the end | {ends} |",
        "",
        "At the end the model, the optimizer, the place in the data and every line of",
        "`metrics.jsonl` are compared with those of a run without faults (of one process, for",
        "ranks too). The recipe's sums are exact in float64, so that a window that ran out of",
        "memory and was cut into smaller micro-batches must give the same bits too.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Read the options, soak, write."""
    parser = argparse.ArgumentParser(
        description="Windows with faults, compared with a run without."
    )
    parser.add_argument("--windows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-ranks", action="store_true", help="one process only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the runs; default: removed at the end"
    )
    options = parser.parse_args()
    if options.windows < 20:
        parser.error("--windows: must be at least 20")
    torch.set_num_threads(1)
    place = options.keep or Path(tempfile.mkdtemp(prefix="wholebatch-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        found = soak(options.windows, options.seed, ranks=not options.no_ranks, place=place)
    finally:
        if options.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(found), encoding="utf-8")
    return 0 if all(row["bit_identical"] for row in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
