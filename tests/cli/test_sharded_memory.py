"""FSDP2 trains a model that is too large for one rank: what a rank holds is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

RANKS = 3
BLOCKS, WIDTH = 24, 128
PARAMETERS = BLOCKS * WIDTH * WIDTH * 4  # bytes

RECIPE = f"""
import torch
from torch import nn
import wholebatch as wb

defaults = {{"batch_size": {2 * RANKS}, "micro_batch": 1, "updates": 2}}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        return x + self.inner(x).tanh()

def model():
    return nn.Sequential(*(Block() for _ in range({BLOCKS})))

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)

def data():
    return torch.utils.data.TensorDataset(torch.randn(12, {WIDTH}))

def loss(model, micro):
    return wb.mean_loss(model(micro[0]).square().mean(), len(micro[0]))
"""

WORKER = """
import json, os, sys
from pathlib import Path
import wholebatch.cli as cli
import wholebatch.whole_batch as whole_batch
from wholebatch.memory.meter import MemoryMeter

whole_batch.has_room = lambda *_, **__: False  # a rank without room for the whole model

class Meter(MemoryMeter):
    def __torch_dispatch__(self, *call):
        for record in list(self._live.values()):  # FSDP2 may have emptied parameters
            storage = None if record.ref is None else record.ref()
            if storage is not None:
                self._see_storage(storage, "parameters")
        return super().__torch_dispatch__(*call)

folder = Path(__file__).parent
arguments = ["train", str(folder / "mine.py"), "--parallel", "fsdp2", "--out", str(folder / "run")]
with Meter() as meter:
    status = cli.main(arguments)
(folder / f"peak-{os.environ['RANK']}").write_text(json.dumps(meter.peak))
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_trains_in_less_memory_than_the_parameters(tmp_path: Path) -> None:
    """No rank ever holds as many bytes as the parameters have: from the start to the checkpoint."""
    (tmp_path / "mine.py").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    torchrun(tmp_path / "worker.py", RANKS)
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = (json.loads(line) for line in lines)
    assert second["loss"] != first["loss"]
    for rank in range(RANKS):
        peak = json.loads((tmp_path / f"peak-{rank}").read_text(encoding="utf-8"))
        # A third of the parameters and of their gradients is the least that a rank can hold.
        assert 2 * PARAMETERS / RANKS < peak < 0.95 * PARAMETERS
