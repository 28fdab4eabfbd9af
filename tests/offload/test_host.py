"""Gradients summed on the host: the update of the undivided batch, and of the plain window."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.memory.inject import OutOfMemoryAt
from tests.offload.seen import watching
from tests.support import EXACT, Whole, adamw, distance, mlp, pieces, samples, sgd, trained
from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError
from wholebatch.offload.parameter_buckets import BUCKET_BYTES
from wholebatch.options import grouped

SPLITS = [[10], [4, 4, 2], [1, 6, 3], [1] * 10]


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def in_pieces(train: wb.WholeBatch, sizes: list[int]) -> None:
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]


def made(
    model: nn.Module, make: Any = adamw, *, sizes: list[int] | None = None, **options: Any
) -> wb.WholeBatch:
    options = {"gradients": "host", "micro_batch": 4, **options}
    train = wb.WholeBatch(model, make(model), loss=loss, **grouped(options))
    if sizes is not None:
        in_pieces(train, sizes)
    return train


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.05}, {"clip_value": 0.01}, {"units": lambda m: len(m["y"])}],
    ids=["plain", "clip_norm", "clip_value", "known"],
)
@pytest.mark.parametrize("on", ["device", "host"])
def test_update_is_that_of_the_undivided_batch(
    sizes: list[int], options: dict[str, Any], on: str
) -> None:
    clips = {name: value for name, value in options.items() if name.startswith("clip")}
    whole = Whole(mlp(), adamw, **clips)
    model = mlp()
    train = made(model, sizes=sizes, optimizer_on=on, **options)
    with watching(model) as parts:
        for _ in range(3):
            whole.step(samples(10))
            train.step(samples(10))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
    whole.assert_same(model, at_most=10 * EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [adamw, sgd, fused], ids=lambda make: make.__name__)
def test_same_bits_as_the_plain_window(dtype: torch.dtype, make: Any) -> None:
    plain, host = mlp(dtype=dtype), mlp(dtype=dtype)
    one, other = made(plain, make, gradients="device"), made(host, make)
    for number in (10, 13):
        one.step(samples(number, dtype=dtype))
        other.step(samples(number, dtype=dtype))
    assert all(map(torch.equal, plain.parameters(), host.parameters()))
    assert all(p.grad_dtype is p.dtype for p in host.parameters())


class Tied(nn.Module):
    """One matrix at both ends, a parameter that nothing uses, and one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 6)
        self.turn = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.turn(self.embed(tokens)))
        x = x + self.conv(x[:, None]).mean(1)
        return functional.linear(x, self.embed.weight)


def test_tied_weights_unused_parameters_and_other_memory_orders() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (7, 5), generator=generator)
    batch = {"x": tokens, "y": tokens.roll(1, 1)}

    def mean(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(micro["x"]).flatten(0, 1), micro["y"].flatten())

    whole = Whole(Tied().double(), adamw, loss=mean)
    model = Tied().double()
    before = model.unused.weight.detach().clone()
    train = made(model, micro_batch=3)
    for _ in range(2):
        whole.step(batch)
        train.step(batch)
    whole.assert_same(model, at_most=10 * EXACT)
    assert torch.equal(model.unused.weight, before)


def test_tied_weights_in_16_bit_have_the_bits_of_the_plain_window() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (7, 5), generator=generator)
    batch = {"x": tokens, "y": tokens.roll(1, 1)}
    models = [Tied().bfloat16() for _ in range(2)]
    for model, gradients in zip(models, ("device", "host"), strict=True):
        made(model, sgd, micro_batch=3, gradients=gradients).step(batch)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_gradient_hooks_see_the_whole_gradient_once() -> None:
    seen: list[Tensor] = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 0.5

    whole = Whole(mlp(), sgd, clip_norm=0.1)  # its copy of a model would have no hooks
    model = mlp()
    for hooked in (whole.model, model):
        hooked[0].weight.register_hook(halved)
    whole.step(samples(10))
    made(model, sgd, clip_norm=0.1).step(samples(10))
    whole.assert_same(model)
    assert len(seen) == 2
    assert distance(seen[1:], seen[:1]) <= EXACT


def test_loss_scale_and_its_skipping() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    host = copy.deepcopy(plain)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    one = made(plain, sgd, gradients="device", scaler=scalers[0])
    other = made(host, sgd, scaler=scalers[1])
    batch = samples(10, dtype=torch.float32)
    for _ in range(3):
        one.step(batch)
        other.step(batch)
    batch["x"][7] *= 1e37  # a finite loss, and gradients beyond what float32 holds at this scale
    batch["y"][7] = plain(batch["x"][7]).argmin()
    steps = [train.step(batch) for train in (one, other)]
    assert steps[0].skipped is not None
    assert steps[0].skipped == steps[1].skipped
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**12
    assert all(map(torch.equal, plain.parameters(), host.parameters()))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_not_finite(policy: Any) -> None:
    model = mlp()
    train = made(model, nonfinite=policy)
    train.step(samples(10))
    before = [p.detach().clone() for p in model.parameters()]
    bad = samples(10)
    bad["x"][7] = float("nan")
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="micro-batch 2 of 3"):
            train.step(bad)
    else:
        assert train.step(bad).skipped is not None
    assert all(map(torch.equal, before, model.parameters()))
    train.step(samples(10))


def test_reentrant_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.first = nn.Linear(5, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=True)
            return y

    torch.manual_seed(2)
    start = Checkpointed().state_dict()

    def fresh() -> nn.Module:
        model = Checkpointed()
        model.load_state_dict(start)
        return model

    whole = Whole(fresh(), sgd)
    whole.step(samples(10))
    model = fresh()
    made(model, sgd).step(samples(10))
    whole.assert_same(model)


def test_accumulator_in_a_loop_of_ones_own() -> None:
    whole, model = Whole(mlp(), adamw, clip_norm=0.1), mlp()
    acc = wb.Accumulator(
        model, adamw(model), steps=3, clip_norm=0.1, memory=wb.Memory(gradients="host")
    )
    batches = [samples(9), samples(5)]
    for batch in batches:
        whole.step(batch)
    sizes = [[4, 4, 1], [2, 3]]
    micros = [m for batch, s in zip(batches, sizes, strict=True) for m in pieces(batch, s)]
    assert len(trained(model, acc, micros)) == 2
    whole.assert_same(model, at_most=10 * EXACT)


@pytest.mark.parametrize("after", ["host", "device"])
def test_resume_in_the_middle_of_a_window(after: str) -> None:
    straight = mlp()
    train = made(straight, adamw)
    train.step(samples(10))
    saved: dict[str, Any] = {}

    def keep(done: int, of: int) -> None:
        if done == 2:
            saved.update(
                train=train.state_dict(),
                model={n: t.clone() for n, t in straight.state_dict().items()},
            )

    optimizer = copy.deepcopy(train._window.target.optimizers[0].state_dict())
    train.step(samples(11), after_micro=keep)

    resumed = mlp()
    again = made(resumed, adamw, gradients=after)
    resumed.load_state_dict(saved["model"])
    again._window.target.optimizers[0].load_state_dict(optimizer)
    again.load_state_dict(saved["train"])
    again.step(samples(11))
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


@pytest.fixture
def _little_to_collect() -> Iterator[None]:
    """A window that begins again collects garbage: not among all that other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_little_to_collect")
def test_out_of_memory_begins_again() -> None:
    counted = OutOfMemoryAt(phase="backward")
    model = mlp()
    with counted:
        made(model, sizes=[4, 4, 2], audit=False).step(samples(10))
    for place in range(1, counted.seen, 7):
        model, reference = mlp(), mlp()
        train = made(model, sizes=[4, 4, 2], audit=False)
        with OutOfMemoryAt(place, phase="backward") as failure:
            step = train.step(samples(10))
        assert failure.failed_at is not None
        assert train.recoveries == 1
        sizes = {0: [2, 2, 4, 2], 1: [4, 2, 2, 2], 2: [4, 4, 1, 1]}
        made(reference, sizes=sizes[train._fitting.recovered[0].micro_batch]).step(samples(10))
        assert step.micro_batches == 4
        assert all(map(torch.equal, reference.parameters(), model.parameters()))


def test_optimizer_steps_in_parts_and_its_post_hook_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BUCKET_BYTES, "host", 500)
    model, calls = mlp(), []
    train = made(model, clip_norm=0.1)
    optimizer = train._window.target.optimizers[0]
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    whole = Whole(mlp(), adamw, clip_norm=0.1)
    with watching(model) as parts:
        for _ in range(2):
            whole.step(samples(10))
            train.step(samples(10))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
    assert parts.steps > 2 * 3
    assert parts.most < len(list(model.parameters()))
    assert len(calls) == 2
    whole.assert_same(model, at_most=10 * EXACT)


def test_several_optimizers_and_groups() -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = [m for m in model if isinstance(m, nn.Linear)]
        groups = [{"params": o.parameters(), "lr": 0.01 * (i + 1)} for i, o in enumerate(others)]
        return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(groups)]

    plain, host = mlp(), mlp()
    clip = [0.05, None, 0.02]
    for model, where in ((plain, "device"), (host, "host")):
        train = wb.WholeBatch(
            model,
            make(model),
            loss=loss,
            micro_batch=4,
            clip_norm=clip,
            memory=wb.Memory(gradients=where),
        )
        for _ in range(2):
            train.step(samples(10))
    assert distance(host.parameters(), plain.parameters()) <= EXACT


# ------------------------------------------------------------------- refusals


class AcrossParameters(torch.optim.SGD):
    """Its step size depends on the norm over all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held if p.grad is not None]).norm()
        with torch.no_grad():
            for p in held:
                assert p.grad is not None
                p.sub_(p.grad / norm * self.param_groups[0]["lr"])


class EachByItself(torch.optim.Optimizer):
    """An optimizer of someone's own that treats each parameter by itself."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


def test_an_optimizer_that_reckons_across_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"AcrossParameters.*reckons across parameters"):
        made(mlp(), lambda m: AcrossParameters(m.parameters(), lr=0.1))


def test_an_optimizer_of_ones_own_is_tried_out() -> None:
    whole, model = Whole(mlp(), lambda m: EachByItself(m.parameters())), mlp()
    whole.step(samples(10))
    made(model, lambda m: EachByItself(m.parameters())).step(samples(10))
    whole.assert_same(model)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="gradients='disk': must be one of 'device', 'host'"):
        made(mlp(), gradients="disk")
    with pytest.raises(OptionError, match='add gradients="host"'):
        made(mlp(), gradients="device", optimizer_on="host")
    with pytest.raises(OptionError, match="optimizer_on='moon'"):
        made(mlp(), optimizer_on="moon")
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    with pytest.raises(UnsupportedError, match=r"0\(sparse=True\)"):
        made(sparse, sgd)

    def watched(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    with pytest.raises(UnsupportedError, match="step pre-hook"):
        made(mlp(), watched)
