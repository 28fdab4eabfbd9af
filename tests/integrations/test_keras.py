"""Keras: the cases of keras_cases.py, on each backend in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("keras") is None:  # importing it here would import TensorFlow
    pytest.skip("keras is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CASES = {
    "tensorflow": ("keras_cases.py", "keras_tensorflow_cases.py"),
    "torch": ("keras_cases.py",),
}


@pytest.mark.slow
@pytest.mark.timeout(950)
@pytest.mark.parametrize("backend", CASES)
def test_cases_on(backend: str) -> None:
    """A backend is chosen once per process, and TensorFlow must not come into this one."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "benchmarks"))),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "--durations=5", *(str(HERE / name) for name in CASES[backend])],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
