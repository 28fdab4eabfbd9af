"""Holds wholebatch in every library beside that library's own accumulation; writes the table.

    python benchmarks/comparison.py                    # all libraries: docs/comparison.md
    python benchmarks/comparison.py lightning jax      # these again; the other rows are kept

Every library runs in a process of its own. What a row is, and how a library comes in, is said in
`benchmarks/compare/__init__.py`. Fails if wholebatch is above its limit in any row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from importlib import import_module
from pathlib import Path

from compare import CASES, LIBRARIES, LIMITS, Row

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "benchmarks" / "comparison.json"
PAGE = ROOT / "docs" / "comparison.md"
MARK = "rows: "


def measured(name: str) -> list[Row]:
    """The rows of one library, from a process of its own."""
    environment = {**os.environ, **LIBRARIES[name], "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--in-this-process", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [Row(**row) for row in json.loads(lines[-1].removeprefix(MARK))]


def said(error: float | None) -> str:
    if error is None:
        return "none"
    return "0" if error == 0 else f"{error:.0%}" if error >= 0.095 else f"{error:.1e}"


def page(rows: list[Row], day: str) -> str:
    head = f"""# Beside each library's own accumulation

How far a library's own accumulation is from what the same library trains on undivided batches: the
relative L2 distance of the updates, with plain SGD. 1% means that the update itself is off by that
much. The cases are those of `benchmarks/compare/row.py`. The last column is the largest error of
wholebatch; above {LIMITS["float64"]:.0e} in float64 or {LIMITS["float32"]:.0e} in float32 the
command fails. Written by `make compare` on {day}; do not edit. In float64, unless another precision
is named.

| library | {" | ".join(CASES)} | wholebatch, at most |
|---|{"---:|" * (len(CASES) + 1)}
"""
    groups: dict[tuple[str, str], list[Row]] = {}
    notes = []
    for row in rows:
        first = row.case == CASES[0]
        if first:
            groups[row.library, row.note] = []
        group = next(key for key in reversed(groups) if key[0] == row.library)
        groups[group].append(row)
        if row.note not in ("", group[1]):
            notes.append(f"- {row.library}, {row.case}: {row.note}.\n")
    body = []
    for (library, note), of_group in groups.items():
        own = {row.case: said(row.own) for row in of_group}
        precision = of_group[0].precision.removeprefix("float64")
        name = ", ".join(filter(None, [library, precision, note]))
        cells = [name, *(own.get(case, "") for case in CASES)]
        body.append(f"| {' | '.join(cells)} | {said(max(row.ours for row in of_group))} |\n")
    return "".join([head, *body, "\n", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; default: all")
    parser.add_argument("--in-this-process", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        rows = import_module(f"compare.{options.in_this_process}").rows()
        print(MARK + json.dumps([asdict(row) for row in rows]))
        return
    unknown = sorted(set(options.libraries) - set(LIBRARIES))
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(LIBRARIES)}")

    found: dict[str, list[dict[str, object]]] = {}
    for name in options.libraries or LIBRARIES:
        rows = measured(name)
        found[name] = [asdict(row) for row in rows]
        for row in rows:
            print(
                f"{row.library:24} {row.case:14} {row.precision}  {said(row.own):>8}  "
                f"{said(row.ours):>8}",
                flush=True,
            )
    by_library: dict[str, list[dict[str, object]]] = {}
    if options.libraries and RECORD.exists():
        by_library = json.loads(RECORD.read_text(encoding="utf-8"))["libraries"]
    by_library |= found
    day = date.today().isoformat()
    everything = [
        Row(**row)  # type: ignore[arg-type]
        for name in LIBRARIES
        for row in by_library.get(name, ())
    ]
    RECORD.write_text(
        json.dumps({"date": day, "libraries": by_library}, indent=1) + "\n", encoding="utf-8"
    )
    PAGE.write_text(page(everything, day), encoding="utf-8")
    above = [row for row in everything if not row.keeps]
    if above:
        raise SystemExit("\n".join(f"above the limit: {row}" for row in above))


if __name__ == "__main__":
    main()
