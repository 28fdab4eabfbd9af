"""Layers that are compiled once and recorded for every layer, on a CUDA device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import steps_of
from wholebatch.compile.joint_graph import JointStep

Micro = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, 4, width // 4).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(x.shape))
        added: Tensor = self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))
        return x + added


class Deep(nn.Module):
    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(512, 256)
        self.layers = nn.ModuleList(Layer(256, dropout) for _ in range(depth))
        self.read = nn.Linear(256, 512, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.read(x)
        return logits


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def batch(rows: int) -> Micro:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 512, (rows, 256), generator=generator)
    return {"x": tokens.cuda(), "y": tokens.roll(-1, 1).cuda()}


def trained(execute: str, depth: int = 6, **options: Any) -> tuple[Tensor, wb.WholeBatch]:
    """The update of a few windows, the last micro-batch of which is shorter."""
    model = Deep(depth).to("cuda", options.pop("dtype", torch.float32))
    before = parameters_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=8, execute=execute, **options)  # type: ignore[arg-type]
    with warnings_of_the_compiler():
        for _ in range(4):
            train.step(batch(20))
    return parameters_of(model) - before, train


@contextmanager
def warnings_of_the_compiler() -> Iterator[None]:
    """Inductor warns about itself (TF32, for one), and is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def parameters_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def steps_in(train: wb.WholeBatch) -> list[Any]:
    return list(steps_of(train).values())


def test_recorded_blocks_make_the_update_of_eager_code() -> None:
    wanted, _ = trained("eager", dtype=torch.float64)
    found, train = trained("graph", dtype=torch.float64)
    assert error(found, wanted) <= 1e-12
    steps = steps_in(train)
    assert [step.mode for step in steps] == ["graph of compile"] * 2
    assert all(len(step.joint._run.calls) > 10 for step in steps)
    assert all(len({id(call.run) for call in step.joint._run.calls}) <= 7 for step in steps)


def test_blocks_are_as_exact_as_eager_code_in_bf16_and_take_no_more_memory() -> None:
    truth, _ = trained("eager", dtype=torch.float64)
    eager, _ = trained("eager", precision="bf16")
    held = []
    for blocks in (True, False):
        with mock.patch.object(JointStep, "blocks", blocks):
            found, train = trained("graph", precision="bf16")
        assert error(found, truth) <= 1.25 * error(eager, truth)
        held.append(in_graphs())
        del train
    print(f"  with and without blocks: {held}")
    assert 0 < held[0] <= 1.1 * held[1], held


def in_graphs() -> int:
    """Bytes of the pools of recorded graphs that are alive.

    All that is reserved would be more than that: workspaces, and what is only cached, which depends
    on the tests before this one.
    """
    gc.collect()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


def test_every_replay_and_every_layer_drops_other_numbers() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(256))

        def forward(self, x: Tensor) -> Tensor:
            one: Tensor = self.weight
            for _ in range(6):
                one = one.sin().tanh()
            return x + functional.dropout(torch.ones_like(x) + one, 0.5)

    def spread(model: nn.Module, micro: Tensor) -> wb.Loss:
        mean = model(micro) / 16 - 1.0
        return wb.Loss((mean**2).sum(), mean.numel())

    model = nn.Sequential(*(Drops() for _ in range(16))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = wb.WholeBatch(model, optimizer, loss=spread, micro_batch=8, execute="graph")
    with warnings_of_the_compiler():
        losses = [float(train.step(torch.zeros(16, 256).cuda()).loss) for _ in range(6)]
    [step] = steps_in(train)
    assert step.mode == "graph of compile"
    assert len(step.joint._run.calls) > 16
    assert all(0.05 < one < 0.075 for one in losses), losses  # 1 / 16 on average.
    assert len(set(losses[2:])) == 4, losses
