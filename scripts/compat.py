"""Run the exactness tests against several versions of torch and Python, and write the matrix.

    python scripts/compat.py                        # every pair of CASES whose Python is here
    python scripts/compat.py 2.6.0/3.10 newest/3.13

Each pair is torch/Python. An interpreter is looked up on PATH as `python3.10` and so on. With
pyenv, `PYENV_VERSION=3.10.13:3.11.7:3.12.1:3.13.0` puts several there. Each pair gets an
environment in a temporary folder, removed after its run: newer builds of torch bring gigabytes of
CUDA.
Writes docs/benchmarks/compat.json and .md; rows of other pairs are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The oldest torch with every Python, and each newer torch with one or two of them.
CASES = (
    "2.6.0/3.10", "2.6.0/3.11", "2.6.0/3.12", "2.6.0/3.13", "2.11.0/3.12", "2.13.0/3.11",
    "newest/3.10", "newest/3.13",
)  # fmt: skip
# What the tests import beside torch.
PACKAGES = (
    "numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "rich", "scikit-learn",
)  # fmt: skip
FILES = (
    "batch/test_splitting.py",
    "batch/test_splitting_samples.py",
    "batch/test_splitting_tokens.py",
    "coupled/test_batchnorm_entry_points.py",
    "coupled/test_coupled_loss.py",
    "entry_points/test_accumulator.py",
    "entry_points/test_on_gradient.py",
    "entry_points/test_over.py",
    "entry_points/test_own_step.py",
    "entry_points/test_state.py",
    "entry_points/test_whole_batch.py",
    "losses/test_loss.py",
    "repo/test_walk.py",
    "window/test_close.py",
    "window/test_optimizer_step.py",
    "window/test_precision.py",
    "window/test_target.py",
)
# Tests of the engine, which needs torch 2.11.
ENGINE = (
    "compile/test_blocks.py",
    "compile/test_causal_lm.py",
    "compile/test_fallback.py",
    "compile/test_guards.py",
    "compile/test_inductor.py",
    "compile/test_internals.py",
    "compile/test_joint.py",
    "compile/test_rewrite.py",
    "compile/test_shapes.py",
)
# Tests of what an older torch does not have, by the first version that has it: fp32 sums of 16-bit
# parameters, and Adagrad's factor inside its fused kernel (the update is the same without it).
NOT_BEFORE = {
    (2, 11): (
        "window/test_precision.py::test_256_micro_batches_of_16_bit_gradients_add_up_in_fp32",
        "window/test_precision.py::test_which_optimizers_take_fp32_gradients_of_16_bit_parameters",
        "window/test_precision.py::test_a_16_bit_loss_is_not_scaled_by_a_rounded_number",
        "entry_points/test_on_gradient.py::test_gradients_of_16_bit_parameters_are_float32",
        "entry_points/test_own_step.py::test_gradients_have_the_dtype_of_the_parameters",
    ),
    (2, 13): (
        "window/test_close.py::test_fused_optimizers_take_the_factor_without_a_pass[None-Adagrad]",
        "window/test_close.py::test_fused_optimizers_take_the_factor_without_a_pass[0.05-Adagrad]",
    ),
}


def interpreter(version: str) -> str | None:
    """Return the path of this Python, or None where it is missing or does not start."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return None
    return found


def environment(folder: str, *, python: str, torch: str) -> Path:
    """Make an environment in this folder with this torch, and return its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = Path(folder) / "bin" / "python"
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    subprocess.run(
        [own, "-m", "pip", "install", "-q", "--no-compile", wanted, *PACKAGES], check=True
    )
    return own


def measure(python: Path) -> dict[str, Any]:
    """Run the tests with this Python, and return how they ended."""
    found = subprocess.run(
        [python, "-c", "import sys, torch; print(torch.__version__, sys.version.split()[0])"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    number = tuple(int(part) for part in re.findall(r"\d+", found[0])[:2])
    left_out = [name for first, tests in NOT_BEFORE.items() if number < first for name in tests]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += [f"tests/{name}" for name in (*FILES, *(ENGINE if number >= (2, 11) else ()))]
    command += [part for name in left_out for part in ("--deselect", f"tests/{name}")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    counts = {
        word: int(number)
        for number, word in re.findall(
            r"(\d+) (passed|failed|error|skipped|deselected)", done.stdout
        )
    }
    return {"torch": found[0], "python": found[1], "status": done.returncode, **counts}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the matrix as Markdown."""
    lines = ["| torch | Python | passed | failed | left out |", "|---|---|---:|---:|---:|"]
    for row in rows:
        failed = row.get("failed", 0) + row.get("error", 0)
        left_out = row.get("deselected", 0) + row.get("skipped", 0)
        lines.append(
            f"| {row['torch']} | {row['python']} | {row.get('passed', 0)} | {failed} | {left_out} |"
        )
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    """Add these rows to the record, and write its page."""
    folder = ROOT / "docs" / "benchmarks"
    path = folder / "compat.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    known = {(row["torch"], row["python"]): row for row in (*kept, *rows)}
    ordered = [
        known[key]
        for key in sorted(
            known, key=lambda key: [int(n) for n in re.findall(r"\d+", " ".join(key))]
        )
    ]
    record = {"date": date.today().isoformat(), "rows": ordered}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    about = (
        f"Written by `make compat` on {record['date']}: the exactness tests of the core on a CPU, "
        "and from torch 2.11 on those of compiled graphs. Left out are tests of 16-bit parameters "
        "before torch 2.11, of the factor inside fused Adagrad before 2.13 (the update is the same "
        "without it), and tests that need a GPU or a package that is not installed there."
    )
    page = f"# Versions of torch and Python\n\n{about}\n\n{table(ordered)}\n"
    (folder / "compat.md").write_text(page, encoding="utf-8")
    print(table(ordered))


def main(cases: list[str]) -> int:
    rows = []
    for case in cases:
        torch, _, version = case.partition("/")
        python = interpreter(version)
        if python is None:
            print(f"{case}: left out, no python{version} on PATH", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="compat-") as folder:
            rows.append(measure(environment(folder, python=python, torch=torch)))
        write(rows)
    return max((int(row["status"]) for row in rows), default=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CASES)))
