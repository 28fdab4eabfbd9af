"""Tensor parallelism, alone and beside FSDP2: counts and norms are over the right ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, torchrun


@pytest.mark.slow
@pytest.mark.distributed
def test_the_update_is_that_of_the_undivided_batch(tmp_path: Path) -> None:
    worker = ROOT / "tests" / "distributed" / "tensor_parallel_worker.py"
    torchrun(worker, 4, str(tmp_path / "report.json"))
    for rank in json.loads((tmp_path / "report.json").read_text()):
        for case, off in rank["off"].items():
            assert off["update"] <= 1e-12, case
            assert off["norm"] <= 1e-12, case
        assert "a DTensor in DistributedDataParallel" in rank["refused"]
        assert "its parameters are on several meshes" in rank["gathered"]
