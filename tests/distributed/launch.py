"""Starts a script under torchrun on this machine, and gives back what its ranks reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def torchrun(
    script: Path, ranks: int, *arguments: str, timeout: float = 240, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """One run of `script` with `ranks` processes, gloo on loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def reports(script: Path, ranks: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 of the script wrote to the report file that it was given."""
    report = folder / "report.json"
    torchrun(script, ranks, str(report), *arguments)
    found: dict[str, Any] = json.loads(report.read_text())
    return found
