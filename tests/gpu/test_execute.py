"""Recorded and compiled micro-steps on a CUDA device make the update of eager code."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import steps_of
from tests.support import grouped
from wholebatch.compile import execute_mode as plan

Micro = dict[str, Tensor]
VOCABULARY = 96


class Tagger(nn.Module):
    """Tied embedding with a padding row, attention, LayerNorm, dropout, checkpointing."""

    def __init__(self, *, dropout: float = 0.0, recompute: bool = False, width: int = 64) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(dropout)
        self.read = nn.Linear(width, VOCABULARY, bias=False)
        self.read.weight = self.embed.weight

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + self.drop(functional.scaled_dot_product_attention(q, k, v)[:, 0])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.mixed, x, use_reentrant=False) if self.recompute else self.mixed(x)
        logits: Tensor = self.read(x)
        return logits


def batch(samples: int = 19, length: int = 32) -> Micro:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    counted = torch.randint(1, length, (samples, 1), generator=generator)
    return {"x": tokens, "y": labels.masked_fill(torch.arange(length) >= counted, -100)}


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def fresh(dtype: torch.dtype = torch.float32, **options: Any) -> Tagger:
    torch.manual_seed(0)
    return Tagger(**options).to("cuda", dtype)


def trained(
    model: nn.Module,
    execute: str,
    *,
    windows: int = 4,
    as_traced: bool = False,
    **options: Any,
) -> tuple[Tensor, wb.WholeBatch]:
    """The whole update of a few windows, and the WholeBatch that made it."""
    before = parameters_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss": loss, "micro_batch": 4, "clip_norm": 1.0, **options}
    train = wb.WholeBatch(model, optimizer, execute=execute, **grouped(options))
    if as_traced:
        train._runner.executor._plan.compiles = False
    for _ in range(windows):
        train.step(batch())
    return parameters_of(model) - before, train


def parameters_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def modes(train: wb.WholeBatch) -> list[str]:
    return [step.mode for step in steps_of(train).values()]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def warnings_of_the_compiler() -> Iterator[None]:
    """Inductor warns about itself (TF32, for one), and is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def test_compiled_and_recorded_micro_steps_in_float64() -> None:
    wanted, _ = trained(fresh(torch.float64), "eager")
    with warnings_of_the_compiler():
        found, train = trained(fresh(torch.float64), "graph")
    assert modes(train) == ["graph of compile"] * 2
    assert error(found, wanted) <= 1e-12


def test_many_sizes_share_one_compiled_graph() -> None:
    """One graph for the first shape, one for all others, and a recording of what comes often."""
    found = []
    for execute in ("eager", "graph"):
        model = fresh(torch.float64)
        before = parameters_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=loss,
            micro_batch=4,
            execute=execute,  # type: ignore[arg-type]
        )
        with warnings_of_the_compiler():
            for samples, length in [(16, 32)] * 2 + [(19, 48), (14, 24), (15, 40)] * 5:
                train.step(batch(samples, length))
        found.append(parameters_of(model) - before)
    steps = steps_of(train).values()
    assert [step.mode for step in steps] == ["graph of compile"] * 7
    assert [step.joint.sizes is not None for step in steps] == [False] + [True] * 6
    assert len({id(step.joint) for step in steps}) == 2
    assert error(found[1], found[0]) <= 1e-12


def test_bf16_is_as_near_to_the_truth_as_eager_code() -> None:
    """With weight gradients that add themselves, also of the tied weight."""
    truth, _ = trained(fresh(torch.float64), "eager")
    allowed = 1.25 * error(trained(fresh(), "eager", precision="bf16")[0], truth)
    found, train = trained(fresh(), "graph", precision="bf16", as_traced=True)
    assert modes(train)[0] == "graph of operations"
    fused = next(iter(steps_of(train).values())).joint.fused
    assert (fused["products"], fused["embeddings"]) == (2, 1)
    assert error(found, truth) <= allowed
    with warnings_of_the_compiler():
        found, train = trained(fresh(), "graph", precision="bf16")
    assert modes(train)[0] == "graph of compile"
    assert error(found, truth) <= allowed


def test_dropout_is_drawn_anew_at_every_replay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 1, bias=False)).cuda()

    def total(model: nn.Module, micro: Tensor) -> wb.Loss:
        return wb.Loss(model(micro).sum(), len(micro))

    for compiled in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train = wb.WholeBatch(model, optimizer, loss=total, micro_batch=1, execute="graph")
        train._runner.executor._plan.compiles = compiled
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_, seen=seen: seen.append(model[1].weight.grad.clone())
        )
        with warnings_of_the_compiler():
            for _ in range(4):
                train.step(torch.ones(8, 256))
        assert train._runner.executor.mode.startswith("graph of")
        # The mean of 8 masks of 0 and 2; one mask for all replays would give 0 and 2 alone.
        assert len(seen[-1].unique()) > 5
        assert not torch.equal(seen[-1], seen[-2])
        assert abs(float(seen[-1].mean()) - 1.0) < 0.15


def test_checkpointing_is_in_the_graph_with_the_masks_of_the_forward() -> None:
    wanted, _ = trained(fresh(torch.float64), "eager")
    found, train = trained(fresh(torch.float64, recompute=True), "graph", as_traced=True)
    assert modes(train)[0] == "graph of operations"
    assert error(found, wanted) <= 1e-12
    # The loss is linear in the weight: it is the product of the weight and its gradient, if the
    # backward has the masks of the forward.
    torch.manual_seed(0)
    model = Dropped().cuda().double()
    train = wb.WholeBatch(
        model,
        None,
        loss=lambda model, micro: wb.Loss(model(micro).sum(), len(micro)),
        micro_batch=4,
        execute="graph",
        audit=False,
    )
    train._runner.executor._plan.compiles = False
    losses = set()
    for _ in range(4):
        step = train.gradient(torch.ones(12, 64, dtype=torch.float64, device="cuda"))
        gradient = model.read.weight.grad
        assert gradient is not None
        product = float((gradient * model.read.weight.detach()).sum())
        assert abs(product - step.loss) <= 1e-12 * abs(step.loss)
        losses.add(step.loss)
        model.zero_grad()
    assert train._runner.executor.mode == "graph of operations"
    assert len(losses) == 4  # new masks in every window


class Dropped(nn.Module):
    """Drops half of its inputs in a checkpointed block, and weighs the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.read = nn.Dropout(0.5), nn.Linear(64, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda x: self.read(self.drop(x)), x, use_reentrant=False)
        return made


def test_a_recorded_step_waits_for_its_numbers_alone() -> None:
    """From the split to the optimizer's step; the numbers are read after it, through an event."""
    model = fresh()
    train = wb.WholeBatch(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        loss=loss,
        micro_batch=4,
        precision="bf16",
        clip_norm=1.0,
        execute="graph",
    )
    train._runner.executor._plan.compiles = False
    on_host = batch(20)
    for whole in ({name: leaf.cuda() for name, leaf in on_host.items()}, on_host):
        for _ in range(4):  # Windows 2, 4 and 8 are tested, which reads numbers.
            train.step(whole)
        with waiting_is_an_error():
            step = train.step(whole)
        assert train._runner.executor.mode == "graph of operations"
        assert step.units == int((on_host["y"] != -100).sum())
    assert train.updates == 10


def test_auto_compiles_beside_the_run() -> None:
    reference, model = fresh(torch.float64), fresh(torch.float64)
    scale = 1.0 + time.time() % 1.0  # No cache holds a graph with this constant.

    def scaled(model: nn.Module, micro: Micro) -> wb.Loss:
        found = loss(model, micro)
        return wb.Loss(found.total * scale, found.units)

    train, other = (
        wb.WholeBatch(
            one,
            torch.optim.SGD(one.parameters(), lr=0.01),
            loss=scaled,
            micro_batch=4,
            execute=execute,
        )
        for one, execute in ((model, "auto"), (reference, "eager"))
    )
    executor = train._runner.executor
    modes: list[str] = []
    executor._plan.started -= plan._TRACE_AFTER
    began = time.perf_counter()
    with warnings_of_the_compiler():
        while modes[-2:] != ["graph of compile"] * 2 and time.perf_counter() - began < 120:
            for one in (train, other):
                one.step(batch(16))
            modes.append(executor.mode)
            time.sleep(0.5)  # Rounding grows with the number of updates.
    assert modes[-1] == "graph of compile", executor.notes.history
    assert "graph of operations" in modes
    assert not any("this one compiles" in line for line in executor.notes.history)
    assert error(parameters_of(model), parameters_of(reference)) <= 1e-12


def test_a_tensor_that_moved_is_recorded_anew() -> None:
    reference, model = fresh(torch.float64), fresh(torch.float64)
    trains = [
        wb.WholeBatch(
            one,
            torch.optim.SGD(one.parameters(), lr=0.1),
            loss=loss,
            micro_batch=4,
            execute=execute,
        )
        for one, execute in ((reference, "eager"), (model, "graph"))
    ]
    trains[1]._runner.executor._plan.compiles = False
    for window in range(6):
        if window == 3:
            model.qkv.weight.data = model.qkv.weight.data.clone()
        for train in trains:
            train.step(batch(16))
    assert trains[1]._runner.executor.mode == "graph of operations"
    assert error(parameters_of(model), parameters_of(reference)) <= 1e-12
