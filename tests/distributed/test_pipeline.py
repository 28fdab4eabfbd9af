"""A pipeline makes the update of one process on the undivided batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one launch of four ranks: starting them takes most of the time."""
    worker = Path(__file__).with_name("pipeline_worker.py")
    return reports(worker, 4, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("gpipe 2 stages", 2),
        ("gpipe 4 stages", 2),
        ("1f1b 2 stages", 4),
        ("1f1b 4 stages", 2),
        ("interleaved 2 x 2 stages", 2),
        ("2 replicas", 2),
        ("skipped", 1),
    ],
)
def test_every_case_of(report: dict[str, Any], kind: str, cases: int) -> None:
    found = {case: row for case, row in report["errors"].items() if kind in case}
    assert len(found) == cases
    # Adam's square root amplifies rounding: its updates are held to ten times the floor.
    wrong = {
        case: row
        for case, row in found.items()
        if row["gradients"] > EXACT
        or row["loss"] > EXACT
        or row["update"] > (10 * EXACT if "adamw" in case else EXACT)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("schedule", "schedule='dualpipe': must be one of 'gpipe', '1f1b', 'interleaved'"),
        ("module", "stage=Part: must be a torch.distributed.pipelining.PipelineStage"),
        ("two stages", "schedule='1f1b' with 2 stages on a rank: it runs one"),
        ("clip by group", "clip_norm=[1.0] in a pipeline: stages have parameter groups"),
        ("ddp", "stage 0 is wrapped in DistributedDataParallel: it would reduce"),
        ("batchnorm", "BatchNorm1d '1' in a pipeline: it would normalise with each"),
        ("no target", "step() without target= on the rank of the last stage"),
        ("no inputs", "step() without inputs on the rank of the first stage"),
        ("sizes", "tensors with different first dimensions (3 and 4): every tensor"),
        ("terms", "a loss of several terms in a pipeline"),
        ("state", "this is not a state dict of wholebatch"),
    ],
)
def test_refused(report: dict[str, Any], case: str, said: str) -> None:
    assert report["refused"][case].startswith(said)
