"""FSDP2 in `wholebatch train`: a model that does not fit one rank starts and trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed.launch import torchrun
from wholebatch.cli.sharded_start import _Recorder
from wholebatch.errors import RecipeError


class Own(nn.Module):
    """First values of many kinds: a constructor's, a loop's afterwards, constants, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6))
        self.scale = nn.Parameter(torch.full((4,), 0.5) * torch.arange(4))
        self.register_buffer("mask", torch.ones(3, 3).tril())
        self.turn = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 4)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.constant_(module.bias, 0.25)
        self.layers[2].weight = self.embedding.weight
        self.double()


def test_operations_of_a_constructor_are_run_again() -> None:
    recorder = _Recorder()
    with recorder.watching():
        meta = Own()
    found = {}
    for name, tensor in [*meta.named_parameters(), *meta.named_buffers()]:
        assert tensor.is_meta
        found[name] = recorder.replay(tensor.detach(), name)
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    assert found["scale"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert torch.equal(found["mask"], torch.ones(3, 3).tril().double())
    assert found["layers.0.bias"].tolist() == [0.25] * 4
    assert 0 < float(found["layers.0.weight"].std()) < 0.05
    turn = found["turn"]
    assert torch.allclose(turn @ turn.T, torch.eye(4).double(), atol=1e-6)
    assert found["layers.1.num_batches_tracked"].item() == 0
    assert found["layers.1.running_var"].tolist() == [1.0] * 4
    assert found["embedding.weight"][2].abs().sum() == 0  # the row of the padding
    assert float(found["embedding.weight"].std()) > 0.3


def test_values_from_a_list_are_refused() -> None:
    recorder = _Recorder()
    with recorder, torch.device("meta"):
        value = torch.tensor([1.0, 2.0])  # without _Constants, as an array would be
    with pytest.raises(RecipeError, match=r"the first values of mean are not known.*torch.arange"):
        recorder.replay(value, "mean")


LARGE = """
import torch
from torch import nn
import wholebatch as wb

defaults = {"batch_size": 4, "micro_batch": 1, "updates": 2}
audit = False
WIDTH, LAYERS = 1024, 48  # 201 MB

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
    def forward(self, x):
        return x + torch.tanh(self.mix(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean(1)

def model():
    return Net()

def data():
    return [torch.randn(WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(4)]

def loss(model, micro):
    return wb.Loss(model(micro).square().sum(), len(micro))

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
LIMITED = """
import os, resource, sys
from pathlib import Path

os.chdir(sys.argv[1])
import torch.distributed as dist
from wholebatch.cli import main, train_command, train_loop, training_run  # loaded before the meter
import torch.distributed.fsdp, torch.distributed.checkpoint, torch._dynamo

dist.init_process_group("gloo")
parameters = 48 * 1024 * 1024 * 4
# What the process has now, and for training less than the parameters alone.
lines = Path("/proc/self/status").read_text().splitlines()
[held] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")]
limit = held + int(0.95 * parameters)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
status = main(["train", "large.py", "--out", "run-" + sys.argv[2], "--parallel", sys.argv[2]])
Path(f"{sys.argv[2]}-{dist.get_rank()}.txt").write_text(str(status))
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_model_larger_than_the_memory_of_a_rank_trains(tmp_path: Path) -> None:
    """Every rank may allocate 95% of the parameters' bytes; DDP fails with that, FSDP2 trains."""
    (tmp_path / "large.py").write_text(LARGE, encoding="utf-8")
    script = tmp_path / "limited.py"
    script.write_text(LIMITED, encoding="utf-8")
    torchrun(script, 4, str(tmp_path), "fsdp2", timeout=300)
    assert [(tmp_path / f"fsdp2-{rank}.txt").read_text() for rank in range(4)] == ["0"] * 4
    metrics = (tmp_path / "run-fsdp2/metrics.jsonl").read_text()
    assert metrics.count("\\n") == 2
    whole = torchrun(script, 4, str(tmp_path), "ddp", timeout=300, check=False)
    assert whole.returncode != 0
