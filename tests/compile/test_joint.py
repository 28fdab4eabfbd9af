"""The traced micro-step makes the update of the undivided batch, whatever the model does."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import (
    Micro,
    Tagger,
    dropping,
    loss,
    mean_of_tokens,
    mode_of,
    steps_of,
    tagged,
    total,
    traced,
)
from tests.support import Seen, Whole, distance, mean, mlp, samples, sgd


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("micro_batch", [1, 4, 18])
def test_update_of_the_undivided_batch(micro_batch: int, clip_norm: float | None) -> None:
    model = mlp()
    whole = Whole(model, clip_norm=clip_norm)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = traced(model, optimizer, micro_batch=micro_batch, clip_norm=clip_norm)
    for _ in range(3):
        loss_of_whole = whole.step(samples(18))
        step = train.step(samples(18))
        assert step.loss == pytest.approx(loss_of_whole, rel=1e-12)
    assert mode_of(train) == "operations"
    whole.assert_same(model, seen)


def squared(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x * x
    return x


def test_functions_of_torchscript_are_traced_as_their_python() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; DeBERTa has such functions.
        scripted = torch.jit.script(squared)

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(scripted(x, 1))
            return out

    model = Scripted()
    whole = Whole(model)
    train = traced(model)
    for number in (10, 10, 10):
        whole.step(samples(number))
        train.step(samples(number))
    assert mode_of(train) == "operations"
    whole.assert_same(model)
    assert torch.equal(scripted(torch.full((2,), 3.0), 1), torch.full((2,), 9.0))


def test_zeros_that_are_written_into_stay_apart() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            first, second = (torch.zeros(5, dtype=x.dtype) for _ in range(2))
            first[0] = 1.0
            second[1] = 2.0
            out: Tensor = self.inner(x * first) + self.inner(x * second)
            return out

    model = Filled()
    whole, train = Whole(model), traced(model)
    for _ in range(3):
        whole.step(samples(10))
        train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def test_tied_weights_padding_attention_and_unused_layers() -> None:
    model = Tagger().double()
    whole = Whole(model, decayed, loss=mean_of_tokens)
    train = traced(model, decayed(model))
    for _ in range(3):
        whole.step(tagged(10))
        train.step(tagged(10))
    assert mode_of(train) == "operations"
    # What has a gradient is decayed: that of the unused layer must be None, not zero.
    whole.assert_same(model)
    assert train._runner.executor.notes.history[0].endswith(
        "2 weight gradients and 1 embeddings add themselves"
    )


def test_buffers_move_as_in_eager_code() -> None:
    models = {execute: Tagger().double() for execute in ("eager", "compile")}
    eager = wb.WholeBatch(
        models["eager"], sgd(models["eager"]), loss=loss, micro_batch=4, execute="eager"
    )
    graph = traced(models["compile"])
    for _ in range(3):
        eager.step(tagged(10))
        graph.step(tagged(10))
    assert distance([models["compile"].seen], [models["eager"].seen]) <= 1e-12


def test_terms_with_units_of_their_own() -> None:
    def two(model: nn.Module, micro: Micro) -> object:
        logits = model(micro["x"])
        tokens = wb.cross_entropy(logits, micro["y"])
        return wb.Loss.terms(
            {
                "lm": (tokens.total, tokens.units),
                "size": (logits.square().sum(), logits.shape[0], 0.1),
            }
        )

    def counted(micro: Micro) -> dict[str, Tensor | int]:
        return {"lm": (micro["y"] != -100).sum(), "size": len(micro["y"])}

    models = [Tagger().double() for _ in range(2)]
    eager = wb.WholeBatch(
        models[0], sgd(models[0]), loss=two, units=counted, micro_batch=4, execute="eager"
    )
    graph = traced(models[1], loss=two, units=counted)
    for _ in range(3):
        wanted, step = eager.step(tagged(10)), graph.step(tagged(10))
    assert mode_of(graph) != "eager"
    assert step.terms == pytest.approx(wanted.terms, rel=1e-12)
    assert distance(models[1].parameters(), models[0].parameters()) <= 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_and_loss_scaling(precision: str) -> None:
    """The same operations in the same formats: the same update as eager code, to rounding."""
    models = [mlp(dtype=torch.float32) for _ in range(2)]
    batch = samples(18, dtype=torch.float32)
    options = {"loss": loss, "micro_batch": 4, "precision": precision, "clip_norm": 0.1}
    eager = wb.WholeBatch(models[0], sgd(models[0]), execute="eager", **options)
    graph = traced(models[1], **options)
    start = copy.deepcopy(models[0])
    for _ in range(4):
        eager.step(batch)
        step = graph.step(batch)
    assert mode_of(graph) == "operations"
    assert step.loss_scale == (65536.0 if precision == "fp16" else 1.0)
    updates = [
        [a - b for a, b in zip(model.parameters(), start.parameters(), strict=True)]
        for model in models
    ]
    assert distance(updates[1], updates[0]) <= 1e-3


def test_weights_are_cast_once_per_window() -> None:
    model = mlp(dtype=torch.float32)
    train = traced(model, micro_batch=2, precision="bf16")
    for _ in range(3):
        train.step(samples(8, dtype=torch.float32))
    (prepared,) = steps_of(train).values()
    casts = [
        node
        for node in prepared.joint._run.graph.nodes  # type: ignore[attr-defined]
        if node.target is torch.ops.aten._to_copy.default
        and node.args[0].op == "placeholder"
        and node.args[0].meta["val"].shape in {p.shape for p in model.parameters()}
    ]
    assert not casts
    assert len(train._runner.executor.memory.casts._copies) == 6


def test_sixteen_bit_parameters_are_added_in_fp32() -> None:
    model = mlp(dtype=torch.bfloat16)
    reference = copy.deepcopy(model)
    train = traced(model, micro_batch=1)
    eager = wb.WholeBatch(reference, sgd(reference), loss=loss, micro_batch=1, execute="eager")
    batch = samples(24, dtype=torch.bfloat16)
    for _ in range(2):
        train.step(batch)
        eager.step(batch)
    assert mode_of(train) == "operations"
    assert all(
        buffer.dtype is torch.float32
        for buffer in train._runner.executor.memory.gradients.of(range(6))
    )
    assert distance(model.parameters(), reference.parameters()) <= 1e-3


def test_dropout_draws_new_masks_for_every_micro_batch() -> None:
    torch.manual_seed(0)
    model = dropping()
    optimizer = sgd(model)
    train = traced(model, optimizer, loss=total, micro_batch=1)
    seen = Seen(model, optimizer)
    for _ in range(3):
        train.step(torch.ones(8, 64))
    assert mode_of(train) == "operations"
    values = set(seen.gradients[-1][0].flatten().tolist())
    assert len(values) > 4  # the mean of 8 masks; one mask for all would give 0 and 2 alone
    assert not torch.equal(seen.gradients[-1][0], seen.gradients[-2][0])


def test_checkpointing_without_randomness_is_in_the_graph() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model = Checkpointed()
    whole = Whole(model, loss=mean)
    train = traced(model)
    for _ in range(3):
        whole.step(samples(10))
        train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_autograd_functions_are_in_the_graph() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)  # type: ignore[attr-defined]
            return x**3

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return 3 * x**2 * gradient

    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Cube.apply(self.inner(x))
            return out

    model = Cubic()
    whole = Whole(model)
    train = traced(model)
    for _ in range(3):
        whole.step(samples(10))
        train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_windows_that_fail_leave_nothing_behind() -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    for _ in range(2):
        whole.step(samples(10))
        train.step(samples(10))

    def fail(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.step(samples(10), after_micro=fail)
    assert all(parameter.grad is None for parameter in model.parameters())
    whole.step(samples(10))
    train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ).double()

    def image_loss(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    def image_mean(model: nn.Module, micro: Micro) -> Tensor:
        return functional.cross_entropy(model(micro["x"]), micro["y"])

    batch = {"x": torch.randn(10, 1, 4, 4).double(), "y": torch.randint(0, 3, (10,))}
    whole = Whole(model, loss=image_mean)
    train = traced(model, loss=image_loss, micro_batch=3)
    for _ in range(3):
        whole.step(batch)
        train.step(batch)
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_losses_of_many_updates_agree_with_eager_code() -> None:
    """In fp32, with clipping, a short last micro-batch, and other batches every time."""
    losses = {}
    for execute in ("eager", "compile"):
        model = Tagger().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train = traced(model, optimizer, micro_batch=3, clip_norm=0.5, execute=execute)
        losses[execute] = [train.step(tagged(5 + step % 2)).loss for step in range(40)]
    assert mode_of(train) == "operations"
    assert losses["compile"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["eager"][-1] < 0.9 * losses["eager"][0]


def test_a_module_with_two_names_keeps_its_own_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3)).double()
    own = [id(parameter) for parameter in layer.parameters()]
    whole = Whole(model)
    train = traced(model, loss=lambda m, micro: wb.cross_entropy(m(micro["x"]), micro["y"]))
    for number in (9, 9, 7, 9):
        whole.step(samples(number))
        train.step(samples(number))
    assert mode_of(train) == "operations"
    assert [id(parameter) for parameter in layer.parameters()] == own
    whole.assert_same(model)
