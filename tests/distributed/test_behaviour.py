"""Bytes on the wire, agreement between ranks, refusals, and ranks that fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, reports
from tests.support import EXACT

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("behaviour")
    found: list[dict[str, Any]] = reports(HERE / "behaviour_worker.py", 2, folder)["ranks"]
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_window_reduces_the_bytes_of_one_micro_batch(engine: str, ranks: Any) -> None:
    for rank in ranks:
        by_steps = rank["bytes"][engine]
        assert by_steps["1"]["gradients"] > 5000
        assert by_steps["4"] == by_steps["1"]
        assert by_steps["9"] == by_steps["1"]
        assert by_steps["9"]["small"] < 512


def test_fp16_skipping_is_agreed(ranks: Any) -> None:
    for rank in ranks:  # only rank 1 had the overflow
        assert rank["fp16"]["skipped"].startswith("gradients not finite at loss scale 1024")
        assert rank["fp16"]["scale"] == 512.0
        assert rank["fp16"]["untouched"]


def test_a_loss_that_is_not_finite_raises_on_all_ranks(ranks: Any) -> None:
    assert "another rank has a loss that is not finite" in ranks[0]["nonfinite"]
    assert "micro-batch 2 of 2 on rank 1 has a loss that is not finite" in ranks[1]["nonfinite"]


def test_exact_batchnorm_over_the_global_batch(ranks: Any) -> None:
    for rank in ranks:
        assert rank["batchnorm"]["update"] <= EXACT
        assert rank["batchnorm"]["buffers"] <= EXACT


def test_refusals_name_what_was_given(ranks: Any) -> None:
    hook, sparse, every, unknown, inside, state, flush = ranks[0]["refused"]
    assert "communication hook" in hook
    assert "module: sparse gradients" in sparse
    assert 'sync="every" with DistributedDataParallel' in every
    assert "sync='sometimes': must be" in unknown
    assert "Sequential around DistributedDataParallel" in inside
    assert "save between windows" in state
    assert "has none left" in flush


def test_the_sync_policy_says_why(ranks: Any) -> None:
    assert ranks[0]["policy"].startswith("hold: gradients are reduced once per window (holding")
    assert ranks[0]["policy"] == ranks[1]["policy"]


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("ddp", "raises-1"),
        ("ddp", "dies-1"),
        ("ddp", "leaves-1"),
        ("fsdp2", "raises-0"),
        ("fsdp2", "dies-1"),
        ("fsdp2", "leaves-1"),
    ],
)
def test_no_rank_waits_for_one_that_failed(
    engine: str, how: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """All end within 30 s, counted from the failure and not from the start of Python."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    when = tmp_path / "failed-at"
    command = [sys.executable, str(HERE / "failing_worker.py"), engine, how, str(when)]
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    failed = int(how[-1])
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=90)[1])  # imports included
    finally:
        for process in processes:
            process.kill()
    waited = time.time() - float(when.read_text())
    record_property("waited", waited)
    print(f"{engine} {how}: {waited:.1f} s")
    assert waited < 30
    assert processes[1 - failed].returncode != 0
    if how.startswith("raises"):
        assert processes[failed].returncode != 0
        assert "sample 17 is broken" in outputs[1 - failed]
        assert f"rank {failed}" in outputs[1 - failed]
