"""A run under a hard limit of device memory: nothing crashes, and every update is exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest, mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import wholebatch as wb
from tests.support import grouped
from wholebatch.compile.make_graph import GraphMaker

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits every time

MIB = 2**20
DEVICE = "cuda"
WORDS, WIDTH, SAMPLES = 4096, 128, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = (
            part.view(n, t, 4, w // 4).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, w))
        result: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def fresh() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = GPT().to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches() -> list[dict[str, Tensor]]:
    """Sequences that get longer over time, eight times as long in the end."""
    generator = torch.Generator().manual_seed(6)
    lengths = [64, 64, 96, 128, 192, 256, 320, 384, 448, 512, 512, 512]
    return [
        {
            name: torch.randint(0, WORDS, (SAMPLES, length), generator=generator)
            for name in ("x", "y")
        }
        for length in lengths
    ]


@contextmanager
def limited(mib: int | None) -> Iterator[None]:
    """A limit on what the allocator may take from the device, from what is there now on."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if mib is not None:
        torch.cuda.set_per_process_memory_fraction(mib * MIB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def needs_cuda() -> None:
    if not torch.cuda.is_available():
        raise SkipTest("needs CUDA")


def run(
    sizes: list[list[int]] | None, *, execute: str = "eager", **options: Any
) -> tuple[GPT, wb.WholeBatch, list[list[int]], list[float]]:
    """All batches; split by "auto", or as another run has split them."""
    model, optimizer = fresh()
    seen: list[int] = []

    def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        seen.append(len(micro["x"]))
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        execute=execute,
        clip_norm=1.0,
        **grouped({"micro_batch": "auto" if sizes is None else SAMPLES, **options}),
    )
    split: list[list[int]] = []
    losses: list[float] = []
    torch.manual_seed(7)
    for place, batch in enumerate(batches()):
        if sizes is not None:
            cut = [
                dict(zip(batch, parts, strict=True))
                for parts in zip(*(t.split(sizes[place]) for t in batch.values()), strict=True)
            ]
            train._fitting.split = lambda _, cut=cut: cut  # type: ignore[method-assign, misc]
        step = train.step(batch)
        losses.append(step.loss)
        split.append(seen[-step.micro_batches :])  # those of the attempt that went through
    return model, train, split, losses


def test_growing_sequences_under_a_limit() -> None:
    """Micro-batches become smaller as sequences grow; the bits are those of the same splits."""
    needs_cuda()
    with deterministic():
        with limited(420):
            model, train, split, losses = run(None)
            most = torch.cuda.max_memory_reserved()
        print(
            f"{train.recoveries} recoveries; micro-batches by update "
            f"{[len(sizes) for sizes in split]}, the last of {split[-1][0]} samples; "
            f"at most {most / MIB:.0f} MiB reserved",
            flush=True,
        )
        assert train.recoveries > 0
        assert len(split[0]) == 1
        assert len(split[-1]) > 2
        assert [sum(sizes) for sizes in split] == [SAMPLES] * len(split)
        right, _, same, expected = run(split)
    assert same == split
    assert losses == expected
    for (name, ours), theirs in zip(model.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_growing_sequences_within_a_budget_of_ones_own() -> None:
    """`memory=` sets the limit itself, and the first choice is made for it."""
    needs_cuda()
    with limited(None):
        _, train, split, losses = run(None, memory="420MiB")
        most = torch.cuda.max_memory_reserved()
        print(
            f'memory="420MiB": {train.recoveries} recoveries; micro-batches by update '
            f"{[len(sizes) for sizes in split]}; {train.choose(batches()[0])}",
            flush=True,
        )
    assert most <= 421 * MIB, most
    assert train.updates == len(losses) == len(batches())
    assert all(0 < loss < 20 for loss in losses), losses  # random words: log(4096) is 8.3


def test_recorded_steps_under_a_limit() -> None:
    """Graphs and their pools take memory of their own: they may not crash the run either."""
    needs_cuda()
    with limited(700):
        _, train, split, losses = run(None, execute="auto")
    _, _, _, expected = run(split)
    print(
        f'execute="auto": {train.recoveries} recoveries; micro-batches by update '
        f"{[len(sizes) for sizes in split]}",
        flush=True,
    )
    assert train.updates == len(batches())
    # Dropout of a recorded step draws other numbers; the way down is the same.
    assert abs(losses[-1] - expected[-1]) < 0.05 * expected[-1]


def test_the_chosen_micro_batch_runs_and_nearly_fills_the_limit() -> None:
    """The trial step has shown it: no window runs out of memory."""
    needs_cuda()
    model, optimizer = fresh()
    batch = {name: tensor.repeat(8, 1) for name, tensor in batches()[-1].items()}
    with limited(None):
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"]),
            memory="1GiB",
            execute="eager",
        )
        said = train.choose(batch)
        print(said, f"{torch.cuda.memory_allocated() / MIB:.0f} MiB allocated", flush=True)
        for _ in range(5):
            train.step(batch)
            reserved = torch.cuda.max_memory_reserved() / MIB
            print(f"{train.recoveries} recoveries, {reserved:.0f} MiB reserved", flush=True)
    assert train.recoveries == 0
    assert train.micro_batch_size is not None
    assert 4 <= train.micro_batch_size < len(batch["x"])


def test_an_undivided_batch_keeps_its_graph_as_traced_if_the_compiled_one_has_no_memory() -> None:
    """Only the compiled graph is given up, and the updates stay those of eager code."""
    made = GraphMaker._proven

    def fails(self: GraphMaker, *given: Any, compiled: bool) -> Any:
        if compiled:
            raise torch.OutOfMemoryError("injected")
        return made(self, *given, compiled=compiled)

    def trained(execute: str) -> tuple[nn.Module, wb.WholeBatch]:
        torch.manual_seed(3)
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(16 * 30 * 30, 10)).to(DEVICE).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"]),
            execute=execute,
        )
        x = torch.randn(32, 3, 32, 32, device=DEVICE, dtype=torch.float64)
        for _ in range(6):
            train.step({"x": x, "y": torch.arange(32, device=DEVICE) % 10})
        return model, train

    right, _ = trained("eager")
    with mock.patch.object(GraphMaker, "_proven", fails):
        model, train = trained("graph")
    assert train._runner.executor.mode == "graph of operations", train._runner.executor.notes
    for (name, ours), theirs in zip(model.named_parameters(), right.parameters(), strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), name
