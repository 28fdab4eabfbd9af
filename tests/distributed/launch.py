"""Starts a script on several ranks on this machine, and gives back what its ranks reported."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment_of_ranks() -> dict[str, str]:
    """The environment of this process, with gloo on loopback."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks for a GPU without making it unforkable
    }


def torchrun(
    script: Path, ranks: int, *arguments: str, timeout: float = 240, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """One run of `script` with `ranks` processes under torchrun's agent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    done = subprocess.run(
        command,
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return _checked(done, script) if check else done


def forked(
    script: Path, ranks: int, *arguments: str, timeout: float = 240, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """One run of `script` with `ranks` processes, without an agent and without importing torch."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "script": str(script),
            "arguments": arguments,
            "ranks": ranks,
            "environment": environment_of_ranks(),
            "folder": folder,
            "timeout": timeout,
        }
        server = _fork_server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        out, err = (
            "".join((Path(folder) / f"{rank}.{name}").read_text() for rank in range(ranks))
            for name in ("out", "err")
        )
    done = subprocess.CompletedProcess([str(script), *arguments], int(any(status)), out, err)
    return _checked(done, script) if check else done


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    """The process that the ranks of all jobs of this test session are forked from."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_ranks.py"))],
        env=environment_of_ranks(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # its input ends, and so does it
    return server


def _checked(
    done: subprocess.CompletedProcess[str], script: Path
) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise AssertionError(f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def reports(script: Path, ranks: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 of the script wrote to the report file that it was given."""
    report = folder / "report.json"
    forked(script, ranks, str(report), *arguments)
    found: dict[str, Any] = json.loads(report.read_text())
    return found
