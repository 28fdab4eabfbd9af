"""Two passes give the gradient of the undivided batch for losses that couple samples."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.coupled.contrastive.two_pass import TwoPasses
from wholebatch.errors import LossError, WindowError
from wholebatch.losses.contrastive import clip_loss, siglip_loss, supcon_loss
from wholebatch.losses.loss import Loss, as_loss

SPLITS = [[12], [4, 4, 4], [5, 1, 6], [1] * 12]


def tower(dropout: float = 0.0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))
    return net.double()


class Clip(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image, self.text = tower(dropout), tower(dropout)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


def batch() -> dict[str, Tensor]:
    image, text = torch.randn(2, 12, 6, dtype=torch.float64)
    return {"image": image, "text": text, "label": torch.arange(12) % 4}


def pieces(data: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    parts = {name: value.split(sizes) for name, value in data.items()}
    return [{name: parts[name][k] for name in parts} for k in range(len(sizes))]


def encode(model: Clip, micro: dict[str, Tensor]) -> dict[str, Tensor]:
    image, text = model.image(micro["image"]), model.text(micro["text"])
    return {"image": image, "text": text, "label": micro["label"]}


LOSSES: dict[str, Callable[[Clip, dict[str, Tensor]], Loss]] = {
    "clip": lambda m, r: clip_loss(r["image"], r["text"], scale=m.scale.exp(), rows=5),
    "siglip": lambda m, r: siglip_loss(r["image"], r["text"], scale=m.scale.exp(), rows=5),
    "supcon": lambda m, r: supcon_loss(
        torch.cat([r["image"], r["text"]]), torch.cat([r["label"], r["label"]]), rows=7
    ),
}


def backward(loss: Any, leaves: Any = ()) -> None:
    (loss.total / loss.units).backward()


def inject_plainly(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients)


def run_two_pass(
    coupled: Coupled,
    model: Any,
    micros: Any,
    *,
    whole: Any,
    inject: Any = inject_plainly,
    moved: Any = lambda micro: micro,
    gather: Any = None,
) -> None:
    modules = [model] if isinstance(model, nn.Module) else list(model)
    passes = TwoPasses(micros, lambda m: coupled.encode(model, moved(m)), modules=modules)
    representations = passes.first()
    whole(as_loss(coupled.loss(representations.for_loss(gather))))
    passes.second(representations, inject)


def grads(model: nn.Module) -> Tensor:
    found = [
        p.grad.flatten() if p.grad is not None else p.detach().flatten() * 0
        for p in model.parameters()
    ]
    return torch.cat(found)


def error(got: nn.Module, want: nn.Module) -> float:
    return float((grads(got) - grads(want)).norm() / grads(want).norm())


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_undivided_batch(name: str, sizes: list[int]) -> None:
    model, data = Clip(), batch()
    reference = copy.deepcopy(model)
    backward(LOSSES[name](reference, encode(reference, data)))
    coupled = Coupled(encode, lambda all: LOSSES[name](model, all))
    run_two_pass(coupled, model, pieces(data, sizes), whole=backward)
    assert error(model, reference) <= 1e-12


def test_plain_accumulation_is_far_off() -> None:
    model, data = Clip(), batch()
    reference = copy.deepcopy(model)
    backward(LOSSES["clip"](reference, encode(reference, data)))
    for micro in pieces(data, [4, 4, 4]):
        (LOSSES["clip"](model, encode(model, micro)).total / 12).backward()
    assert error(model, reference) > 0.05


@pytest.mark.parametrize("sizes", SPLITS[1:])
def test_dropout_is_replayed(sizes: list[int]) -> None:
    """Against the graphs of all micro-batches alive at once, with the same random numbers."""
    model, data = Clip(dropout=0.4), batch()
    reference = copy.deepcopy(model)
    micros = pieces(data, sizes)
    torch.manual_seed(3)
    parts = [encode(reference, micro) for micro in micros]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    after = torch.get_rng_state()
    backward(LOSSES["clip"](reference, joined))
    torch.manual_seed(3)
    coupled = Coupled(encode, lambda all: LOSSES["clip"](model, all))
    run_two_pass(coupled, model, micros, whole=backward)
    assert error(model, reference) <= 1e-12
    assert torch.equal(torch.get_rng_state(), after)


def test_buffers_move_once_and_hooks_are_told() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tower()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    model = Counting()
    order: list[int] = []

    def inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        order.append(index)
        torch.autograd.backward(outputs, gradients)

    moved: list[int] = []

    def move(x: Tensor) -> Tensor:
        moved.append(len(x))
        return x

    coupled = Coupled(lambda m, x: m(x), lambda z: Loss((z @ z.T).square().sum(), len(z)))
    x = torch.randn(6, 6, dtype=torch.float64)
    run_two_pass(coupled, model, x.split([2, 4]), whole=backward, inject=inject, moved=move)
    assert model.calls == 2
    assert order == [0, 1]
    assert moved == [2, 4, 2, 4]


def test_several_models_frozen_towers_and_a_scaled_backward() -> None:
    towers = (tower(), tower().requires_grad_(False))
    references = copy.deepcopy(towers)
    data = batch()

    def both(models: tuple[nn.Module, nn.Module], micro: dict[str, Tensor]) -> list[Tensor]:
        return [models[0](micro["image"]), models[1](micro["text"])]

    def scaled(loss: Any, leaves: Any = ()) -> None:
        (1024.0 * loss.total).backward()

    scaled(clip_loss(*both(references, data)))
    coupled = Coupled(both, lambda all: clip_loss(*all))
    run_two_pass(coupled, towers, pieces(data, [5, 7]), whole=scaled)
    assert error(towers[0], references[0]) <= 1e-12
    assert all(p.grad is None for p in towers[1].parameters())


def test_numbers_per_micro_batch_a_load_balance_loss() -> None:
    """A mixture of experts: the loss needs the share of every expert over the whole batch."""
    router = nn.Linear(6, 3).double()
    reference = copy.deepcopy(router)
    x = torch.randn(12, 6, dtype=torch.float64)

    def shares(model: nn.Module, micro: Tensor) -> tuple[Tensor, Tensor]:
        chances = model(micro).softmax(-1)
        return chances.sum(0, keepdim=True), torch.tensor(float(len(micro)), dtype=torch.float64)

    def balance(all: tuple[Tensor, Tensor]) -> Loss:
        return Loss(3 * (all[0].sum(0) / all[1].sum()).square().sum(), 1)

    backward(balance(tuple(t.reshape(1, -1) for t in shares(reference, x))))  # type: ignore[arg-type]
    run_two_pass(Coupled(shares, balance), router, x.split([5, 1, 6]), whole=backward)
    assert error(router, reference) <= 1e-12


def test_ranks_gather_the_representations() -> None:
    """Rank 0 of two: the other rank's rows are joined, and only the own ones lead back."""
    model, data = Clip(), batch()
    reference = copy.deepcopy(model)
    own, others = pieces(data, [7, 5])
    mine, theirs = encode(reference, own), encode(reference, others)
    far = {name: value.detach() for name, value in theirs.items()}
    joined = {name: torch.cat([mine[name], far[name]]) for name in mine}
    backward(LOSSES["clip"](reference, joined))
    rest = iter(far.values())
    coupled = Coupled(encode, lambda all: LOSSES["clip"](model, all))
    run_two_pass(
        coupled,
        model,
        pieces(own, [3, 4]),
        whole=backward,
        gather=lambda leaf: torch.cat([leaf, next(rest)]),
    )
    assert error(model, reference) <= 1e-12


def test_an_encoder_that_is_not_repeatable_is_refused() -> None:
    generator = torch.Generator()

    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        return model(x + torch.randn(x.shape, generator=generator, dtype=x.dtype))

    coupled = Coupled(noisy, lambda z: Loss((z @ z.T).sum(), len(z)))
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(WindowError, match="other representations the second time"):
        run_two_pass(coupled, tower(), x.split(2), whole=backward)


def test_python_s_random_numbers_are_replayed() -> None:
    def jittered(model: nn.Module, x: Tensor) -> Tensor:
        return model(x * random.random())

    coupled = Coupled(jittered, lambda z: Loss((z @ z.T).sum(), len(z)))
    x = torch.randn(4, 6, dtype=torch.float64)
    run_two_pass(coupled, tower(), x.split(2), whole=backward)


def test_structures_are_checked() -> None:
    coupled = Coupled(lambda m, x: "text", lambda z: Loss(z, 1))
    with pytest.raises(LossError, match="encode returned str"):
        run_two_pass(coupled, tower(), [torch.zeros(1, 6)], whole=backward)
    changing = Coupled(lambda m, x: [m(x)] * len(x), lambda z: Loss(z, 1))
    x = torch.randn(3, 6, dtype=torch.float64)
    with pytest.raises(LossError, match="another structure"):
        run_two_pass(changing, tower(), x.split([1, 2]), whole=backward)
