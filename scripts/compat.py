"""Run the exactness tests against several versions of torch, and write the matrix.

    python scripts/compat.py                # the oldest, 2.11, 2.13 and the newest
    python scripts/compat.py 2.6.0

Each version gets an environment of its own in build/compat-VERSION, which is kept. Writes
docs/benchmarks/compat.json and .md. Below 2.11 there are no compiled graphs and no 16-bit
parameters; tests of these are left out there, and counted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.6.0", "2.11.0", "2.13.0", "newest")
PACKAGES = (
    "numpy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "rich",
    "scikit-learn",
)
FILES = (
    "test_loss.py", "test_close.py", "test_accumulator.py", "test_engine.py", "test_precision.py",
    "test_splitting.py", "test_splitting_tokens.py", "test_splitting_samples.py", "test_state.py",
    "test_over.py", "test_optimizer_step.py", "test_on_gradient.py", "test_walk.py",
    "test_target.py", "test_own_step.py", "test_engine_coupled.py", "test_engine_batchnorm.py",
)  # fmt: skip
# Tests of what an older torch does not have: fp32 sums of 16-bit parameters, and Adagrad's factor
# inside its fused kernel (the update is the same without it).
NOT_BEFORE_2_11 = (
    "test_close.py::test_fused_optimizers_take_the_factor_without_a_pass[None-Adagrad]",
    "test_close.py::test_fused_optimizers_take_the_factor_without_a_pass[0.05-Adagrad]",
    "test_precision.py::test_256_micro_batches_of_16_bit_gradients_add_up_in_fp32",
    "test_precision.py::test_which_optimizers_take_fp32_gradients_of_16_bit_parameters",
    "test_precision.py::test_a_16_bit_loss_is_not_scaled_by_a_rounded_number",
    "test_on_gradient.py::test_gradients_of_16_bit_parameters_are_float32",
    "test_own_step.py::test_gradients_have_the_dtype_of_the_parameters",
)


def environment(version: str) -> Path:
    """Return the Python of an environment with this torch; it is made once."""
    folder = ROOT / "build" / f"compat-{version.removesuffix('.0')}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        torch = "torch" if version == "newest" else f"torch=={version}"
        subprocess.run([python, "-m", "pip", "install", "-q", torch, *PACKAGES], check=True)
    return python


def measure(version: str) -> dict[str, Any]:
    """Return how the tests ended with one version of torch."""
    python = environment(version)
    found = subprocess.run(
        [python, "-c", "import sys, torch; print(torch.__version__, sys.version.split()[0])"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    number = tuple(int(part) for part in re.findall(r"\d+", found[0])[:2])
    left_out = NOT_BEFORE_2_11 if number < (2, 11) else ()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += [f"tests/{name}" for name in FILES]
    command += [part for name in left_out for part in ("--deselect", f"tests/{name}")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    print(done.stdout[-2000:])
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|deselected)", done.stdout)
    }
    return {"torch": found[0], "python": found[1], "status": done.returncode, **counts}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the matrix as Markdown."""
    lines = ["| torch | Python | passed | failed | left out |", "|---|---|---:|---:|---:|"]
    for row in rows:
        numbers = (row.get(word, 0) for word in ("passed", "failed", "deselected"))
        lines.append(f"| {row['torch']} | {row['python']} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def main(versions: list[str]) -> int:
    folder = ROOT / "docs" / "benchmarks"
    path = folder / "compat.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [measure(version) for version in versions]
    known = {row["torch"]: row for row in (*kept, *rows)}
    ordered = [
        known[name]
        for name in sorted(known, key=lambda n: [int(p) for p in re.findall(r"\d+", n)[:3]])
    ]
    record = {"date": date.today().isoformat(), "rows": ordered}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    about = (
        f"Written by `make compat` on {record['date']}: the exactness tests of the core on a CPU. "
        "Left out before torch 2.11 are tests of 16-bit parameters and of Adagrad's fused factor."
    )
    page = f"# Versions of torch\n\n{about}\n\n{table(ordered)}\n"
    (folder / "compat.md").write_text(page, encoding="utf-8")
    print(table(ordered))
    return max(int(row["status"]) for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(VERSIONS)))
