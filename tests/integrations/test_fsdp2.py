"""FSDP2 on two ranks inside Accelerate and Lightning: the update of the undivided global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

pytest.importorskip("accelerate")
pytest.importorskip("lightning")


@pytest.mark.distributed
def test_fsdp2_on_two_processes(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("fsdp2_worker.py"), 2, tmp_path)
    assert found.keys() == {"Accelerate", "Lightning"}
    assert not {case: error for case, error in found.items() if error > EXACT}
