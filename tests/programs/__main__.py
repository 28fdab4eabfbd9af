"""`make programs`: write programs, run them, and print the smallest of each kind that fails.

python -m tests.programs --seconds 600 --seed 1
python -m tests.programs --way plain     # training loops without wholebatch, for lint and verify
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

from tests.programs.grammar import KINDS
from tests.programs.judge import KINDS as VERDICTS
from tests.programs.plain.search import search as search_plain
from tests.programs.search import work


def line(counts: Counter[str], started: float, seconds: float) -> str:
    """Return the progress line."""
    spent = max(time.monotonic() - started, 1e-3)
    total = sum(counts.values())
    left = max(0.0, seconds - spent)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS)
    return f"{total} programs, {total / spent:.1f}/s, {left:.0f} s left: {told}"


def main() -> int:
    """Run the machine for a while; the exit status is 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--way", choices=("wholebatch", "plain"), default="wholebatch")
    parser.add_argument("--out", type=Path, help="write the failing scripts to this file")
    arguments = parser.parse_args()
    if arguments.device == "cpu":  # a process with CUDA cannot fork one that trains
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["JAX_PLATFORMS"] = "cpu"
    if arguments.way == "plain":
        return search_plain(arguments.seconds, arguments.seed, arguments.jobs)
    with tempfile.TemporaryDirectory() as known:
        return search(arguments, Path(known))


def search(arguments: argparse.Namespace, known: Path) -> int:
    """Draw programs in several processes, and print what fails."""
    context = get_context("spawn")
    tell = context.SimpleQueue()
    shared = (arguments.seed, arguments.seconds, arguments.device, arguments.kind, known, tell)
    workers = [
        context.Process(target=work, args=(number, *shared)) for number in range(arguments.jobs)
    ]
    for worker in workers:
        worker.start()
    print(f"seed {arguments.seed}, {arguments.jobs} processes", flush=True)
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    often: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    started, shown, open_ = time.monotonic(), 0.0, len(workers)
    while open_ and not (arguments.first and often):
        of, kind, failure = tell.get()
        if kind == "done":
            open_ -= 1
        elif kind is not None:
            counts[kind] += 1
            by_kind.setdefault(of, Counter())[kind] += 1
            often.update([failure] if failure else ())
        else:
            text, source, verdict = failure
            failures[verdict.signature] = text
            told = verdict.detail.strip()[-1500:]
            whole = f"\n{'=' * 80}\n{verdict.signature}\n{text}\n{told}\n{'-' * 80}\n{source}"
            if arguments.out is None:
                print(whole)
            else:
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(whole)
        if time.monotonic() - shown > (1.0 if sys.stdout.isatty() else 20.0):
            shown = time.monotonic()
            end = "\r" if sys.stdout.isatty() else "\n"
            print(line(counts, started, arguments.seconds), end=end, flush=True)
    for worker in workers if open_ else []:
        worker.terminate()
    print(line(counts, started, arguments.seconds))
    for of, some in sorted(by_kind.items()):
        told = ", ".join(f"{many} {kind}" for kind, many in some.most_common())
        print(f"{of}: {sum(some.values())} programs, {told}")
    for signature, many in often.most_common():
        print(f"FAILED {many} times: {signature}\n       {failures.get(signature, '')}")
    return 1 if often else 0


if __name__ == "__main__":
    sys.exit(main())
