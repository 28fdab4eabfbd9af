"""Starts a script under torchrun on this machine, and gives back what its ranks reported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests import processes

ROOT = processes.ROOT


def torchrun(
    script: Path, ranks: int, *arguments: str, timeout: float = 240, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """One run of `script` with `ranks` processes, gloo on loopback."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": processes.PATH,
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    done = processes.run(
        script, *arguments, cwd=ROOT, environment=environment, timeout=timeout, ranks=ranks
    )
    if check and done.returncode:
        raise AssertionError(f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def reports(script: Path, ranks: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 of the script wrote to the report file that it was given."""
    report = folder / "report.json"
    torchrun(script, ranks, str(report), *arguments)
    written: dict[str, Any] = json.loads(report.read_text())
    return written
