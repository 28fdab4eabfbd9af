"""Programs that once made a wrong update without a word, each against the undivided batch."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import wholebatch as wb
from tests.support import EXACT, distance
from wholebatch.batch import Batches
from wholebatch.errors import StateError, WindowError

Gradients = dict[str, Tensor]


def seeded(make: Any) -> Any:
    torch.manual_seed(1)
    return make()


def kept(into: Gradients) -> wb.Close:
    return wb.Close(on_gradient=lambda named: into.update({n: p.grad.clone() for n, p in named}))


def assert_same(model: nn.Module, gradients: Gradients, tolerance: float = EXACT) -> None:
    """Compare with the gradients that a plain backward has left in the model."""
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    assert distance([gradients[n] for n, _ in model.named_parameters()], wanted) <= tolerance


def test_more_without_a_closing_backward_ends_with_its_item() -> None:
    x, model, gradients = torch.randn(8, 3).double(), seeded(lambda: nn.Linear(3, 1)).double(), {}
    reference = seeded(lambda: nn.Linear(3, 1)).double()
    reference(x).square().mean().backward()
    acc = wb.Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.0), steps=4, close=kept(gradients)
    )
    for index, micro in enumerate(acc.over(x.split(2))):
        acc.backward(model(micro).square().sum(), units=2, more=True)
        if index == 1:  # the second loss exists only sometimes
            acc.backward((model(micro) * 0).sum(), units=2)
    assert acc.last_step is not None
    assert (acc.last_step.units, acc.last_step.micro_batches) == (8, 4)
    assert_same(reference, gradients)


def test_flush_counts_a_micro_batch_that_was_left_with_more() -> None:
    model = nn.Linear(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.0), steps=4)
    acc.backward(model(torch.randn(2, 3)).square().sum(), units=2, more=True)
    step = acc.flush()
    assert step is not None
    assert (step.units, step.micro_batches) == (2, 1)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_totals_of_two_dtypes_start_from_one_seed(late: int) -> None:
    x, places, gradients = torch.randn(9, 3), iter(range(3)), {}
    reference = seeded(lambda: nn.Linear(3, 1))
    (reference(x).square().sum() / 9).backward()

    def loss(model: Any, micro: Tensor) -> wb.Loss:
        total = model(micro).square().sum()
        return wb.Loss(total.bfloat16() if next(places) == late else total, len(micro))

    model = seeded(lambda: nn.Linear(3, 1))
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        loss=loss,
        units=len,
        micro_batch=3,
        execute="eager",
        audit=False,
        close=kept(gradients),
    )
    train.step(x)
    assert_same(reference, gradients, 1e-6)


def test_an_output_layer_that_is_replaced_is_used() -> None:
    vocabulary = 65536

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embedding(input_ids)  # type: ignore[no-any-return]

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model, self.head = Base(), nn.Linear(4, vocabulary, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.base_model(input_ids))  # type: ignore[no-any-return]

    model, ids = Language(), torch.randint(0, vocabulary, (4, 300))
    for _ in range(2):
        loss = wb.causal_lm(model, {"input_ids": ids})
        logits = model(ids)[:, :-1].flatten(0, 1)
        plain = functional.cross_entropy(logits, ids[:, 1:].flatten())
        assert float(loss.total.detach()) / float(loss.units) == pytest.approx(
            float(plain.detach()), rel=1e-5
        )
        model.head = nn.Linear(4, vocabulary, bias=False)
        nn.init.normal_(model.head.weight, std=2.0)
    loss = wb.causal_lm(model, {"input_ids": ids})
    loss.total.backward()
    assert model.head.weight.grad is not None


def test_batches_of_several_widths_are_not_padded_with_a_class() -> None:
    def batch(width: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 9, (2, width))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "shift_labels": ids.roll(-1, 1),
        }

    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["input_ids"]), micro["shift_labels"])

    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10)).double()
    some = [batch(3), batch(5)]
    wanted = sum(float(loss(model, part).total.detach()) for part in some) / 16
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        loss=loss,
        micro_batch=wb.tokens(100),
        execute="eager",
    )
    step = train.step(Batches(some))
    assert step.units == 16
    assert step.loss == pytest.approx(wanted, rel=1e-12)


def test_loops_side_by_side_on_one_model_are_refused() -> None:
    model = nn.Linear(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    data = torch.randn(8, 3).split(2)
    with pytest.raises(WindowError, match="this loop is over: another"):
        for micro, _ in zip(acc.over(data), acc.over(data), strict=True):
            acc.backward(model(micro).square().sum(), units=2)


def test_backward_without_gradients_breaks_no_window() -> None:
    model = nn.Linear(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(WindowError, match=r"backward\(\) under torch.no_grad"):
            acc.backward(model(torch.randn(2, 3)).square().sum(), units=2)
        step = acc.backward(model(torch.randn(2, 3)).square().sum(), units=2)
    assert step is not None


def test_a_save_after_flush_inside_a_loop_resumes_at_the_next_item() -> None:
    items: list[Any] = list(torch.randn(12, 3).split(2))

    def resumed(saved: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        model = nn.Linear(3, 1)
        acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4)
        if saved is not None:
            acc.load_state_dict(saved)
        read, state = [], {}
        for micro in acc.over(items):
            read.append(next(i for i, item in enumerate(items) if item is micro))
            acc.backward(model(micro).square().sum(), units=2)
            if len(read) == 2 and saved is None:
                acc.flush()
                state = acc.state_dict()
        return read, state

    _, state = resumed(None)
    assert resumed(state)[0] == [2, 3, 4, 5]


def test_run_takes_parameters_beside_the_model_and_functions_without_a_hash() -> None:
    parameter = nn.Parameter(torch.ones(3))

    @dataclass
    class Weighted:
        weight: float = 2.0

        def __call__(self, micro: Tensor) -> wb.Loss:
            return wb.Loss((parameter * micro).sum() * self.weight, 1)

    acc = wb.Accumulator(nn.Identity(), torch.optim.SGD([parameter], 0.5), steps=1)
    loss = Weighted()
    assert acc.run(loss, torch.ones(3)) is not None
    assert acc.run(loss, torch.ones(3)) is not None
    assert parameter.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    "generator", [numpy.random.default_rng(0), random.Random(0), torch.Generator()]
)
def test_generators_of_the_users_own(generator: Any) -> None:
    def loss(model: Any, micro: Tensor) -> Tensor:
        if isinstance(generator, torch.Generator):
            noise = torch.randn(micro.shape, generator=generator)
            return (model(micro + noise)).square().sum(-1)  # type: ignore[no-any-return]
        return (model(micro) * generator.uniform(0.5, 1.5)).square().sum(-1)  # type: ignore[no-any-return]

    model = nn.Linear(3, 2)
    train = wb.WholeBatch(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, micro_batch=2, execute="eager"
    )
    for _ in range(3):
        assert train.step(torch.randn(6, 3)).units == 6


def test_containers_of_the_users_own_are_not_written_to() -> None:
    class Frozen(OrderedDict[str, Any]):
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self.is_frozen = True

        def __setitem__(self, name: str, value: Any) -> None:
            if vars(self).get("is_frozen"):
                raise RuntimeError("frozen")
            super().__setitem__(name, value)

        def update(self, *args: Any, **values: Any) -> None:
            raise RuntimeError("frozen")

        clear = update  # type: ignore[assignment]

    class Vocabulary(dict[str, int]):
        def __init__(self, words: list[str]) -> None:
            super().__init__((word, place) for place, word in enumerate(words))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Frozen(width=3, names=["a"])
            self.words = Vocabulary(["a", "b"])
            self.layer = nn.Linear(3, 2)
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / len(self.words)  # type: ignore[no-any-return]

    model = Net()
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, micro: model(micro).square().sum(-1),
        micro_batch=2,
        execute="eager",
    )
    for _ in range(2):
        assert train.step(torch.randn(6, 3)).units == 6
    assert dict(model.config) == {"width": 3, "names": ["a"]}
    assert model.words == {"a": 0, "b": 1}


def test_a_scheduler_may_be_loaded_from_a_later_place() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    acc = wb.Accumulator(model, optimizer, steps=2, scheduler=scheduler)

    def window() -> None:
        for _ in range(2):
            acc.backward(model(torch.randn(2, 3)).square().sum(), units=2)

    window()
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 50})
    window()
    assert scheduler.last_epoch == 51
    scheduler.step()
    with pytest.raises(WindowError, match="StepLR was stepped by the loop"):
        window()


def test_a_class_called_ddp_is_a_plain_module() -> None:
    class DDP(nn.Linear):
        """A denoising diffusion prior."""

    model = DDP(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    assert acc.backward(model(torch.randn(2, 3)).square().sum(), units=2) is not None


def test_a_loss_function_may_call_its_model_input() -> None:
    model = nn.Linear(3, 1)
    train = wb.WholeBatch(
        model, None, loss=lambda input, micro: input(micro).square().sum(-1), micro_batch=2
    )
    assert train.gradient(torch.randn(4, 3)).units == 4


def test_a_loop_by_next_leaves_its_tail_open() -> None:
    model = nn.Linear(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    data = torch.randn(6, 3).split(2)
    for epoch in range(3):
        batches = iter(acc.over(data))
        for _ in data:
            acc.backward(model(next(batches)).square().sum(), units=2)
        with pytest.raises(WindowError, match=r"still open with 1 of 2 .* flush\(\) to close it"):
            acc.over(data)
        assert acc.flush() is not None
        assert acc.updates == 2 * (epoch + 1)


def test_a_loop_that_gave_way_does_not_go_on() -> None:
    model = nn.Linear(3, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    first, second = acc.over(torch.randn(4, 3).split(2)), acc.over(torch.randn(4, 3).split(2))
    for loop in (first, second):
        acc.backward(model(next(loop)).square().sum(), units=2)
    with pytest.raises(WindowError, match="this loop is over: another"):
        next(first)
    acc.backward(model(next(second)).square().sum(), units=2)
    assert next(second, None) is None
    assert acc.epoch == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_batch_leaves_out_what_a_sampler_repeats(rank: int) -> None:
    sampler: Any = DistributedSampler(range(5), num_replicas=2, rank=rank, shuffle=False)  # type: ignore[arg-type]
    data: Any = torch.arange(5.0).view(5, 1)
    loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
    model = nn.Linear(1, 1)
    train = wb.WholeBatch(model, None, loss=lambda m, b: m(b).square().sum(-1), micro_batch=1)
    read = [number for batch in train.over(loader) for number in batch.flatten().tolist()]
    assert read == ([0, 2, 4] if rank == 0 else [1, 3])


@pytest.mark.parametrize("ahead", [False, True])
def test_whole_batch_resumes_in_the_middle_of_an_epoch(ahead: bool) -> None:
    def train(saved: Any = None, stop: int = 99) -> tuple[list[Tensor], Any, nn.Module]:
        model = seeded(lambda: nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loop = wb.WholeBatch(
            model,
            optimizer,
            loss=lambda m, b: m(b).square().sum(-1),
            micro_batch=1,
            execute="eager",
        )
        torch.manual_seed(3)
        if saved is not None:
            model.load_state_dict(saved["model"])
            loop.load_state_dict(saved["loop"])
        read, state = [], None
        data: Any = torch.arange(16.0).view(8, 2) / 10
        for batch in loop.over(DataLoader(data, batch_size=2, shuffle=True), ahead=ahead):
            if not read:
                with pytest.raises(StateError, match=r"before this item was used"):
                    loop.state_dict()
            loop.step(batch)
            read.append(batch)
            if len(read) == stop:
                state = {"model": model.state_dict(), "loop": loop.state_dict()}
                break
        return read, state, model

    straight, _, model = train()
    first, state, _ = train(stop=1)
    rest, _, resumed = train(copy.deepcopy(state))
    assert all(map(torch.equal, straight, [*first, *rest]))
    assert distance(resumed.parameters(), model.parameters()) == 0


@pytest.mark.parametrize("entry", ["whole", "run"])
def test_writes_of_the_loss_function_are_refused_in_every_window(entry: str) -> None:
    model, writes = nn.Linear(3, 1), []

    def loss(x: Tensor) -> Tensor:
        if writes:
            model(x).sum().backward()
            model.zero_grad()
        return model(x).square().sum(-1)  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 3)
    acc = wb.Accumulator(model, optimizer, steps=2, execute="eager")
    whole = wb.WholeBatch(
        model, optimizer, loss=lambda m, x: loss(x), micro_batch=2, execute="eager"
    )

    def window() -> None:
        if entry == "whole":
            whole.step(x)
            return
        for micro in x.split(2):
            acc.run(loss, micro)

    for _ in range(4):
        window()
    writes.append(1)  # the fifth window is not one of those that are tested
    with pytest.raises(WindowError, match="has changed since the window's last backward"):
        window()
    acc.discard()


def test_what_may_be_a_weight_or_a_sample_is_exact() -> None:
    model = nn.Conv2d(3, 3, 1).double()
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=2)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    whole = ((model(images) - images).square().mean((1, 2, 3)).sum() * 1024 / 2).item()
    acc.backward((model(images[0]) - images[0]).square().mean() * 1024, units=1)
    step = acc.backward((model(images[1]) - images[1]).square().mean() * 1024, units=1)
    assert step is not None
    assert step.loss == pytest.approx(whole, rel=1e-12)
