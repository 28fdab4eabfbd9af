"""While a window is open the gradients of `gradients="moments"` are Adam's own first moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.offload.test_moments import batches, count, loss, made
from tests.support import EXACT, Whole, adamw, distance, mlp, samples
from wholebatch.compile.fused_weight_grad import Adding
from wholebatch.errors import UnsupportedError, WindowError
from wholebatch.offload.adam_accumulation import MomentsStore

Micro = dict[str, Tensor]


class Waves(nn.Module):
    """Complex weights in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(5, 6).double()
        self.mix = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.out = nn.Linear(12, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.into(x).to(torch.complex128) @ self.mix
        return self.out(torch.view_as_real(mixed).flatten(1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight in three places: rows of it, a product with it, and a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(3, 5).double()
        self.out = nn.Linear(5, 3, bias=False).double()
        self.out.weight = self.embedding.weight
        self.mix = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0] > 0).long()
        hidden = self.mix(x + self.embedding(tokens)).tanh() * self.embedding.weight.sum()
        return self.out(hidden)  # type: ignore[no-any-return]


def far(ours: list[Tensor], right: list[Tensor]) -> float:
    def real(tensor: Tensor) -> Tensor:
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    return distance(map(real, ours), map(real, right))


def first_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    return [optimizer.state[p]["exp_avg"] for p in model.parameters()]


@pytest.mark.parametrize("build", [mlp, Waves, Tied])
@pytest.mark.parametrize(
    "settings",
    [
        {"betas": (0.0, 0.9)},
        {"betas": (0.5, 0.99), "maximize": True},
        {"betas": (0.999, 0.9999)},
    ],
    ids=str,
)
@pytest.mark.parametrize("adds", [False, True], ids=["autograd adds", "layers add"])
@pytest.mark.parametrize("small", [0, 20, 2**15], ids=["one by one", "some together", "together"])
def test_moments_for_every_decay_and_kind_of_weight(
    build: Callable[[], nn.Module],
    settings: dict[str, Any],
    adds: bool,
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Adding, "anywhere", adds)
    monkeypatch.setattr("wholebatch.offload.adam_accumulation._SMALL", small)
    monkeypatch.setattr(
        "wholebatch.offload.parameter_buckets._SMALLEST_BUCKET", 400
    )  # several wait

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)

    model = build()
    whole, train = Whole(model, make), made(model, make, sizes=[1, 6, 3])
    optimizer = train._window.target.optimizers[0]
    for batch in batches():
        whole.step(batch)
        train.step(batch)
        moments = first_moments(whole.optimizer, whole.model)
        assert far(first_moments(optimizer, model), moments) <= EXACT
        with torch.no_grad():  # the update has rounded old moments in it: the next begins exact
            for ours, right in zip(model.parameters(), whole.model.parameters(), strict=True):
                seconds = [optimizer.state[ours], whole.optimizer.state[right]]
                assert far(*([s["exp_avg_sq"]] for s in seconds)) <= 1e-4
                seconds[0]["exp_avg_sq"].copy_(seconds[1]["exp_avg_sq"])
                ours.copy_(right)
    added = train._runner.executor._eager.added
    layers = sum(isinstance(m, nn.Linear | nn.Embedding) for m in model.modules())
    assert added == (4 * 2 * layers if adds else 0)  # in all micro-batches but the first


def test_gradients_are_the_moments_and_hooks_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    train = made(model, sizes=[1] * 10)
    optimizer = train._window.target.optimizers[0]
    hooked: list[int] = []
    plain = MomentsStore._made

    def counted(store: MomentsStore, parameter: Tensor) -> None:
        hooked.append(id(parameter))
        plain(store, parameter)

    monkeypatch.setattr(MomentsStore, "_made", counted)
    held: list[bool] = []

    def look(*_: int) -> None:
        held.extend(p.grad is optimizer.state[p]["exp_avg"] for p in model.parameters())
        held.extend(not p._post_accumulate_grad_hooks for p in model.parameters())

    for _ in range(2):
        hooked.clear()
        train.step(samples(10), after_micro=look)
        assert sorted(hooked) == sorted(map(id, model.parameters()))
        assert all(p.grad is None for p in model.parameters())
    assert len(held) == 2 * 10 * 2 * 6
    assert all(held)


def test_a_parameter_without_a_gradient_keeps_its_bits() -> None:
    """In a window that does not use it; and it moves in one whose last micro-batch does."""
    model = nn.ModuleDict({"always": mlp(), "sometimes": mlp()})

    def chosen(both: Any, micro: Micro) -> wb.Loss:
        out = both["always"](micro["x"])
        if bool(micro["x"][-1, 0] > 100):
            out = out + both["sometimes"](micro["x"])
        return wb.cross_entropy(out, micro["y"])

    train = made(model, sizes=[4, 4, 2], loss=chosen)
    optimizer = train._window.target.optimizers[0]
    with_it, without = samples(10), samples(10)
    with_it["x"][-1, 0] = 101.0
    train.step(with_it)

    def state(name: str) -> list[Tensor]:
        return [
            t.clone() for p in model[name].parameters() for t in (p, *optimizer.state[p].values())
        ]

    sometimes, always = state("sometimes"), state("always")
    train.step(without)
    assert all(map(torch.equal, state("sometimes"), sometimes))
    assert not any(map(torch.equal, state("always"), always))
    train.step(with_it)
    assert not any(map(torch.equal, state("sometimes"), sometimes))


def test_a_gradient_that_no_hook_has_seen_counts() -> None:
    """As a window in lock-step leaves those that its last micro-batch did not use."""
    model = nn.ModuleList([mlp(), nn.Linear(2, 1).double()])
    lone = model[1]
    train = made(model, loss=lambda both, micro: loss(both[0], micro))
    optimizer = train._window.target.optimizers[0]
    gradient = torch.tensor([[2.0, -1.0]], dtype=torch.float64)

    def leave(done: int, of: int) -> None:
        if done == of:
            lone.weight.grad = gradient.clone()

    train.step(samples(10), after_micro=leave)
    assert distance([optimizer.state[lone.weight]["exp_avg"]], [0.1 * gradient]) <= EXACT
    assert int(optimizer.state[lone.weight]["step"]) == 1
    assert lone.weight.grad is None
    assert lone.bias not in optimizer.state


def test_a_window_whose_gradients_are_taken_away_is_refused() -> None:
    model = mlp()
    train = made(model)
    optimizer = train._window.target.optimizers[0]
    train.step(samples(10))
    before = copy.deepcopy(optimizer.state_dict()["state"])

    def forget(done: int, of: int) -> None:
        if done == 2:
            optimizer.zero_grad()

    with pytest.raises(WindowError, match=r"4\.bias was taken away in the middle"):
        train.step(samples(10), after_micro=forget)
    after = optimizer.state_dict()["state"]
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [[s[name] for s in states.values()] for states in (after, before)]
        assert distance(*moments) <= 1e-7
    train.step(samples(10))


def test_what_is_found_at_a_windows_beginning_is_refused() -> None:
    model = mlp()
    train = made(model)
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UnsupportedError, match=r"2\.weight has a post-accumulate-grad hook"):
        train.step(samples(10))
    handle.remove()
    train.step(samples(10))
    train._window.target.optimizers[0].param_groups[0]["betas"] = (1.0, 0.999)
    with pytest.raises(UnsupportedError, match="at least 0 and below 1"):
        train.step(samples(10))


def test_sparse_gradients_are_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, 0] > 0).long()
            return nn.functional.embedding(tokens, self.weight, sparse=True)

    model = Rows()
    train = wb.WholeBatch(
        model,
        adamw(model),
        loss=loss,
        micro_batch=4,
        units=count,
        memory=wb.Memory(gradients="moments"),
    )
    with pytest.raises(UnsupportedError, match="a sparse gradient"):
        train.step(samples(10))
