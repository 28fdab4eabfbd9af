"""The rows of the speed benchmark: processes that wait for each other, results that are kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

STUB = """
import json, sys
mode = sys.argv[sys.argv.index("--child") + 1]
if mode == "dies":
    sys.exit("no such device")
turns = 0
print("READY", flush=True)
while sys.stdin.readline().strip() == "go":
    turns += 1
    print("READY", flush=True)
row = {"model": "m", "mode": mode, "micro": 1, "turns": turns}
row.update({"error": "failed"} if mode == "fails" else {"ms": 1.0})
print("ROW " + json.dumps(row), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_row_is_reported_whatever_becomes_of_the_others(tmp_path: Path, rounds: int) -> None:
    from speed.plan import Expected
    from speed.together import Child, run_rows

    script = tmp_path / "stub.py"
    script.write_text(STUB)
    found: list[dict[str, Any]] = []
    specs = [("m", mode, 1) for mode in ("works", "dies", "fails", "works too", "too long")]
    run_rows(
        specs,
        lambda spec, gib: Child(script, spec, [], "", gib),
        lambda spec: Expected(1e9 if spec[1] == "too long" else 0.0, 80.0),
        until=time.monotonic() + 600.0,
        together=2,
        warm_up=500.0,
        rounds=rounds,
        report=found.append,
    )
    by_mode = {row["mode"]: row for row in found}
    assert by_mode.keys() == {"works", "dies", "fails", "works too"}
    assert by_mode["works"]["turns"] == by_mode["works too"]["turns"] == rounds
    assert by_mode["dies"]["error"] == "ended without a result"
    assert by_mode["fails"]["error"] == "failed"


def test_results_are_taken_over_and_times_are_kept(tmp_path: Path) -> None:
    from speed.table import Results

    about = {"date": "2026-01-01", "device": "d", "python": "3", "packages": [], "peak_tflops": 9.0}
    timed = {
        "model": "m",
        "mode": "loop",
        "micro": 1,
        "ms": 5.0,
        "tflops": 1.0,
        "reserved_gib": 2.0,
    }
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"about": about, "rows": [timed]}))
    results = Results(tmp_path / "out", name="new", merged=[earlier])
    assert results.has(("m", "loop", 1))
    assert not results.has(("m", "loop", 4))
    results.add({"model": "m", "mode": "loop", "micro": 1, "error": "out of memory"})
    results.add({"model": "m", "mode": "loop", "micro": 4, "error": "out of memory"})
    page = (tmp_path / "out" / "new.md").read_text() if (tmp_path / "out").exists() else ""
    assert "| loop | 5.0 ms, 11% of peak; 2.0 GiB | out of memory |" in page
    again = Results(tmp_path / "out", name="new", measuring=False)
    assert again.has(("m", "loop", 1))


def test_the_rows_of_the_documentation_are_all_different_and_known() -> None:
    from speed.plan import MAIN, SIZES, VARIANTS, WHOLE, expected

    for specs in (MAIN, VARIANTS):
        assert len(set(specs)) == len(specs)
        for model, mode, micro in specs:
            assert micro in SIZES[model] if mode != WHOLE else micro == 0
            assert expected((model, mode, micro), 3.0).seconds < 200.0
