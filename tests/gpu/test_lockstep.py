"""Exact BatchNorm on a CUDA device: every way to hold the micro-batches gives the same update."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.coupled.batchnorm.lock_step import Hold, LockStep

Pair = tuple[Tensor, Tensor]
HOLDS: tuple[Hold, ...] = ("graphs", "inputs", "host")


class Block(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    blocks = [Block(16, dropout) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(stem, *blocks, *head).cuda()


def batch(size: int, dtype: torch.dtype = torch.float64) -> Pair:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64)
    x = x * torch.linspace(0.3, 2, size, dtype=torch.float64).view(-1, 1, 1, 1) + 1
    return x.to("cuda", dtype), torch.randint(0, 5, (size,), generator=generator).cuda()


def loss(model: nn.Module, data: Pair) -> Tensor:
    return F.cross_entropy(model(data[0]).double(), data[1], reduction="sum")


def moved(micro: Pair) -> Pair:
    return micro[0].cuda(non_blocking=True), micro[1].cuda()


def lockstep(model: nn.Module, data: Pair, sizes: list[int], hold: Hold, windows: int = 1) -> None:
    step = LockStep(
        model,
        hold=hold,
        least_page=1024,
    )
    micros = list(zip(data[0].split(sizes), data[1].split(sizes), strict=True))
    for _ in range(windows):
        step.run(
            [(x.cpu(), y.cpu()) for x, y in micros],
            forward=lambda micro: loss(model, moved(micro)),
            backward=lambda value: value.backward(),
        )


def error(got: nn.Module, want: nn.Module) -> float:
    pairs = [
        (p.grad, q.grad)
        for p, q in zip(got.parameters(), want.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    pairs += [
        (b, c) for b, c in zip(got.buffers(), want.buffers(), strict=True) if b.is_floating_point()
    ]
    gap = torch.cat([(a.double() - b.double()).flatten() for a, b in pairs]).norm()
    return float(gap / torch.cat([b.double().flatten() for _, b in pairs]).norm())


def test_equals_the_undivided_batch_in_float64() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        base = network().double().to(memory_format=layout)
        x, y = batch(22)
        data = (x.contiguous(memory_format=layout), y)
        want = copy.deepcopy(base)
        loss(want, data).backward()
        for hold in HOLDS:
            model = copy.deepcopy(base)
            lockstep(model, data, [8, 5, 1, 8], hold)
            assert error(model, want) <= 1e-12, (hold, layout, error(model, want))


def test_autocast_is_no_further_from_float64_than_the_whole_batch() -> None:
    base = network()
    exact = copy.deepcopy(base).double()
    loss(exact, batch(64)).backward()
    data = batch(64, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        own = copy.deepcopy(base)
        loss(own, data).backward()
        for hold in HOLDS:
            model = copy.deepcopy(base)
            lockstep(model, data, [16, 16, 16, 16], hold)
            assert error(model, exact) <= 1.25 * error(own, exact), hold


def test_pure_bfloat16() -> None:
    model = network().bfloat16()
    lockstep(model, batch(16, torch.bfloat16), [6, 6, 4], "graphs")
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dropout_and_learnt_fetching_change_nothing() -> None:
    base = network(dropout=0.3).double()
    want = copy.deepcopy(base)
    torch.manual_seed(5)
    lockstep(want, batch(24), [6] * 4, "graphs", windows=3)
    for hold in ("inputs", "host"):
        model = copy.deepcopy(base)
        torch.manual_seed(5)
        lockstep(model, batch(24), [6] * 4, hold, windows=3)
        assert error(model, want) <= 1e-13, (hold, error(model, want))


def test_host_memory_does_not_depend_on_the_batch() -> None:
    peaks = []
    model = network()
    for parts in (4, 4, 32):  # the first time for what is made once
        x = torch.randn(parts * 16, 3, 64, 64)
        micros = [(part, torch.zeros(16, dtype=torch.long)) for part in x.split(16)]
        step = LockStep(model, hold="host", least_page=1024)
        for _ in range(2):  # what is fetched ahead is known from the first window on
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step.run(
                micros,
                forward=lambda micro: loss(model, moved(micro)),
                backward=lambda value: value.backward(),
            )
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] <= 1.02 * peaks[1], peaks


# ---------------------------------------------------------------------------- recorded windows


def training(
    model: nn.Module, hold: Hold, total: Any = None, precision: str = "full"
) -> wb.WholeBatch:
    def summed(model: nn.Module, micro: Pair) -> wb.Loss:
        return wb.Loss(loss(model, micro), len(micro[1]))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=total or summed,
        micro_batch=6,
        execute="graph",
        precision=precision,
        batchnorm=wb.BatchNorm("exact", hold=hold),
    )
    train._runner._lock_step._least_page = 1024
    return train


def on_host(size: int, seed: int) -> Pair:
    x, y = batch(size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return x.cpu()[order], y.cpu()[order]


def test_recorded_windows_equal_the_undivided_batch_in_float64() -> None:
    for hold in HOLDS:
        model = network().double()
        want = copy.deepcopy(model)
        optimizer = torch.optim.SGD(want.parameters(), lr=0.05)
        train = training(model, hold)
        for seed in range(4):
            data = on_host(22, seed)  # 6, 6, 6 and 4
            step = train.step(data)
            total = loss(want, (data[0].cuda(), data[1].cuda())) / 22
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = total.item()
            assert abs(step.loss - value) <= 1e-12 * abs(value)
            assert train._runner.recorder.mode == ("recording" if seed else "threads"), hold
        ours, theirs = (
            torch.cat([t.detach().flatten() for t in each.state_dict().values() if t.dim()])
            for each in (model, want)
        )
        far = float((ours - theirs).norm() / theirs.norm())
        assert far <= 1e-12, (hold, far)


def test_recorded_windows_give_the_bits_of_the_threads_also_with_dropout() -> None:
    for dropout in (0.0, 0.3):
        for hold in HOLDS:
            models = [network(dropout), network(dropout)]
            for model, execute in zip(models, ("graph", "eager"), strict=True):
                torch.manual_seed(4)
                train = training(model, hold, precision="bf16")
                train._runner.recorder._off = execute == "eager"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # blocks that draw are not recorded
                    for seed in range(4):
                        x, y = on_host(24, seed)
                        train.step((x.float(), y))
                recorded = execute == "graph" and not (dropout and hold == "inputs")
                mode = "recording" if recorded else "threads"
                assert train._runner.recorder.mode == mode, train._runner.recorder.notes.history
            for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert torch.equal(ours, theirs), (hold, dropout)


def test_what_cannot_be_recorded_leaves_the_device_as_it_was() -> None:
    """A recording that breaks off must not break what comes after it."""

    def reads(model: nn.Module, micro: Pair) -> wb.Loss:
        total = loss(model, micro)
        return wb.Loss(total * (2.0 if float(total) < 0 else 1.0), len(micro[1]))

    model = network().double()
    train = training(model, "graphs", reads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train.step(on_host(12, 0))
    assert any("run by threads instead" in str(warning.message) for warning in said), said
    for seed in range(2):
        train.step(on_host(12, seed))
    dropped = F.dropout(torch.ones(1000, device="cuda"), 0.5)  # the generator works on
    assert 300 < int((dropped == 0).sum()) < 700
    blocks = [torch.empty(1 << 20, device="cuda") for _ in range(3)]  # and the allocator
    del blocks
    torch.cuda.empty_cache()
    again = training(network().double(), "graphs")  # and another recording can be made
    for seed in range(2):
        again.step(on_host(12, seed))
    assert again._runner.recorder.mode == "recording"
