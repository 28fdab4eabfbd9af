"""On a CUDA device: optimizer state on the host, beside the plain window."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import grouped

Micro = dict[str, Tensor]
MIB = 2**20


class Net(nn.Module):
    """Large matrices, small vectors, a tied embedding, and another order of memory."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x + self.conv(x[:, None]).mean(1))
        return nn.functional.linear(x, self.embed.weight)


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def batch(samples: int = 13, length: int = 17) -> Micro:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (samples, length), generator=generator)
    return {"x": tokens, "y": tokens.roll(1, 1)}


def run(
    dtype: torch.dtype, *, width: int = 96, layers: int = 4, updates: int = 3, **options: Any
) -> tuple[nn.Module, list[wb.Step], wb.WholeBatch]:
    torch.manual_seed(0)
    model = Net(width, layers).to(dtype).to("cuda")
    fused = options.pop("fused", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    options = {"micro_batch": 3, "units": lambda m: m["y"].numel(), "execute": "eager", **options}
    train = wb.WholeBatch(model, optimizer, loss=loss, **grouped(options))
    return model, [train.step(batch()) for _ in range(updates)], train


def far(ours: nn.Module, right: nn.Module) -> float:
    a = nn.utils.parameters_to_vector(p.detach().cpu().double() for p in ours.parameters())
    b = nn.utils.parameters_to_vector(p.detach().cpu().double() for p in right.parameters())
    return float((a - b).norm() / b.norm())


def state_of(train: wb.WholeBatch) -> list[Tensor]:
    (optimizer,) = train._ledger.target.optimizers
    return [one for state in optimizer.state.values() for one in state.values() if one.dim()]


def test_the_update_of_the_plain_window() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for options in ({}, {"clip_norm": 0.05}, {"clip_value": 0.001}, {"fused": False}):
            with torch.backends.cudnn.flags(enabled=False):  # torch's convolution repeats its bits
                plain, _, _ = run(dtype, **options)
                ours, _, train = run(dtype, optimizer_state="host", **options)
            # The plain window may clip on the device, where the factor is rounded otherwise.
            at_most = 1e-6 if "clip_norm" in options else 0.0
            assert far(ours, plain) <= at_most, (dtype, options, far(ours, plain))
            assert all(one.is_pinned() for one in state_of(train))


def test_under_recorded_graphs() -> None:
    plain, _, _ = run(torch.float32, updates=6, precision="bf16", execute="graph")
    ours, _, train = run(
        torch.float32, updates=6, precision="bf16", execute="graph", optimizer_state="host"
    )
    assert train._runner.executor.mode == "graph of compile"
    assert far(ours, plain) <= 1e-4


def test_the_device_does_not_hold_the_state() -> None:
    held = {}
    for place in ("device", "host"):
        model, _, train = run(torch.float32, width=1024, layers=8, optimizer_state=place)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train.step(batch())
        held[place] = torch.cuda.max_memory_allocated()
        size = sum(4 * p.numel() for p in model.parameters())
        del model, train
    assert size > 32 * MIB
    assert held["device"] - held["host"] >= 1.2 * size
