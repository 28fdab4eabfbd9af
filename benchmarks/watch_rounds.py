"""Ask `wb.watch` about loops that were written before its judge had seen them, round by round.

python benchmarks/watch_rounds.py                  # the table of every round
python benchmarks/watch_rounds.py --round 6 --only hf
torchrun --nproc-per-node 2 benchmarks/watch_rounds.py --round 9
python benchmarks/watch_rounds.py --truth      # the labels, by the undivided batch in float64
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}

import torch  # noqa: E402

import wholebatch as wb  # noqa: E402
from tests.verification.fixtures import (  # noqa: E402, F401
    round_6,
    round_7,
    round_8,
    round_9,
    round_10,
    round_11,
    round_12,
    round_13,
    round_14,
    round_15,
    round_16,
    round_17,
    round_18,
    round_19,
    round_20,
)
from tests.verification.fixtures.rounds import CASES, is_right  # noqa: E402
from tests.verification.loops.live import found_in, quiet  # noqa: E402


def answer(make: Any) -> tuple[str, str]:
    """Return what the judge found in this loop, and its verdict in words."""
    torch.manual_seed(0)
    watched, train, _ = make()
    arguments = watched if isinstance(watched, tuple) else (watched,)
    try:
        with quiet(), wb.watch(*arguments) as watch:
            train()
    except Exception as error:
        return "crash", repr(error)
    return found_in(watch.verdict), str(watch.verdict)


def grade(key: str, found: str) -> str:
    """Return the column of the table into which this answer falls."""
    if found in ("crash", "not judged"):
        return found
    if key == "right":
        return "right" if found == "right" else "false alarm"
    return "named" if found == key else "missed" if found == "right" else "other cause"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--round", type=int)
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--truth", action="store_true")
    parser.add_argument(
        "--words", action="store_true", help="print the verdicts that are not as wanted"
    )
    options = parser.parse_args()
    gc.freeze()  # what was imported need not be searched for averages of weights every time
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        if os.environ["RANK"] != "0":
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    table: dict[tuple[int, str], Counter[str]] = {}
    for name, (number, key, make) in CASES.items():
        if options.round not in (None, number) or options.only not in name:
            continue
        if name.startswith("ranks_") != (ranks > 1):
            continue
        if options.truth:
            with quiet(), patch.dict(os.environ):
                labelled = is_right(make) == (key == "right")  # type: ignore[no-untyped-call]
            print(f"{name:48} {key:26} {'' if labelled else 'THE LABEL IS WRONG'}", flush=True)
            continue
        with patch.dict(os.environ):  # RANK of a DeepSpeed engine: a trainer would use DDP after it
            found, words = answer(make)
        column = grade(key, found)
        print(f"{number} {name:48} {found:26} {'' if found == key else key}", flush=True)
        if options.words and found != key:
            print(words)
        table.setdefault((number, "right" if key == "right" else "wrong"), Counter())[column] += 1
    for (number, kind), counts in sorted(table.items()):
        print(f"round {number}, {counts.total()} {kind} loops: {dict(counts)}")


if __name__ == "__main__":
    main()
