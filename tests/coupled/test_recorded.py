"""A recorded lock-step window makes the same update; what cannot be recorded runs by threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import EXACT, Whole, distance
from wholebatch.compile.execute_mode import ExecuteWarning
from wholebatch.coupled.batchnorm.lock_step_graph import Recorder
from wholebatch.options import grouped

R = TypeVar("R")


def normed(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def batch(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
    return {
        "x": x * torch.linspace(0.5, 2, size, dtype=torch.float64).view(-1, 1, 1, 1),
        "y": torch.randint(0, 3, (size,), generator=generator),
    }


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
    return wb.Loss(total, micro["y"].numel())


def mean(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(micro["x"]), micro["y"])


class Again:
    """A tape for the CPU: runs everything again, and leaves it where the first run left it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._run: Callable[[], Any] = list

    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        assert not generators  # those of the CPU cannot be replayed
        self._run = run
        self._made = run()
        self._gradients = [parameter.grad for parameter in self._parameters]
        return self._made

    def replay(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        random = torch.get_rng_state()
        made = self._run()
        torch.set_rng_state(random)  # a graph's replay does not draw
        for first, again in zip(self._tensors(self._made), self._tensors(made), strict=True):
            first.copy_(again)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                gradient.copy_(parameter.grad)

    def _tensors(self, made: Any) -> list[Tensor]:
        return [tensor for totals, units in made for tensor in (*totals, *units)]


def training(
    model: nn.Module, *, asked: bool = False, tape: Any = Again, **options: Any
) -> tuple[wb.WholeBatch, Recorder]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss": loss, "micro_batch": 3} | options
    train = wb.WholeBatch(model, optimizer, **grouped(options))
    feeding = train._runner
    feeding.recorder = Recorder(
        feeding._lock_step,
        model=model,
        loss=options["loss"],
        window=train._window,
        forward=feeding.forward,
        execute="graph" if asked else "auto",
        sixteen_bit=False,
        tape=lambda: tape(model),
    )
    return train, feeding.recorder


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("units", [None, lambda micro: micro["y"].numel()])
@pytest.mark.parametrize("holding", ["graphs", "inputs", "host"])
def test_every_window_makes_the_update_of_the_undivided_batch(holding: Any, units: Any) -> None:
    model = normed()
    whole = Whole(model, loss=mean)
    train, recorder = training(model, units=units)
    recorder._lock_step.holding = holding
    modes = []
    for seed in range(5):
        step = train.step(batch(8, seed))  # 3, 3 and 2
        assert step.loss == pytest.approx(whole.step(batch(8, seed)), rel=1e-12)
        assert (step.units, step.micro_batches) == (8, 3)
        modes.append(recorder.mode)
    assert modes == ["threads", "threads", "recording", "recording", "recording"]
    assert distance(model.parameters(), whole.model.parameters()) <= EXACT
    assert distance(buffers(model), buffers(whole.model)) <= EXACT
    assert recorder.notes.history == ["recorded a lock-step window of 3 micro-batches"]


def test_terms_with_units_on_the_device() -> None:
    def terms(model: nn.Module, micro: dict[str, Tensor]) -> Any:
        out = model(micro["x"])
        chosen = micro["y"] > 0
        return wb.Loss.terms(
            {
                "all": (F.cross_entropy(out, micro["y"], reduction="sum"), len(out)),
                "some": (out.square().sum(1)[chosen].sum(), chosen.sum(), 0.3),
            }
        )

    def whole_loss(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        out = model(micro["x"])
        chosen = micro["y"] > 0
        return F.cross_entropy(out, micro["y"]) + 0.3 * out.square().sum(1)[chosen].mean()

    def units(micro: dict[str, Tensor]) -> dict[str, float]:
        return {"all": len(micro["y"]), "some": float((micro["y"] > 0).sum())}

    model = normed()
    whole = Whole(model, loss=whole_loss)
    train, recorder = training(model, loss=terms, units=units)
    for seed in range(4):
        step = train.step(batch(9, seed))
        assert step.loss == pytest.approx(whole.step(batch(9, seed)), rel=1e-12)
    assert recorder.mode == "recording"
    assert distance(model.parameters(), whole.model.parameters()) <= EXACT


def test_other_shapes_and_changed_models_run_by_threads() -> None:
    model = normed()
    whole = Whole(model, loss=mean)
    train, recorder = training(model)
    modes = []
    for window in range(8):
        size = 7 if window == 3 else 9
        if window == 5:
            for module in (model, whole.model):
                module[1].eps = 0.1  # type: ignore[index, assignment]
        train.step(batch(size, window))
        whole.step(batch(size, window))
        modes.append(recorder.mode[0])
    assert "".join(modes) == "ttrtrttr"
    assert distance(model.parameters(), whole.model.parameters()) <= EXACT
    assert distance(buffers(model), buffers(whole.model)) <= EXACT


def test_windows_of_very_many_micro_batches_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wholebatch.coupled.batchnorm.lock_step_graph.MOST_MICRO_BATCHES", 3)
    train, recorder = training(normed(), asked=True)
    modes = []
    for size in (12, 12, 9, 9):  # four micro-batches, and three
        train.step(batch(size, 0))
        modes.append(recorder.mode)
    assert modes == ["threads", "threads", "threads", "recording"]


def test_the_random_numbers_after_it_do_not_depend_on_who_ran() -> None:
    numbers = []
    for execute in ("eager", "auto"):
        model = normed()
        train, recorder = training(model)
        recorder._off = execute == "eager"
        torch.manual_seed(1)
        for seed in range(4):
            train.step(batch(6, seed))
        numbers.append(torch.rand(3))
    assert torch.equal(*numbers)


class Broken(Again):
    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")


class Full(Again):
    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        raise torch.OutOfMemoryError("as if")


class Wrong(Again):
    def replay(self) -> None:
        super().replay()
        for gradient in self._gradients:
            if gradient is not None:
                gradient.mul_(2)


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda *_: None)


def counting(model: nn.Sequential) -> None:
    found = model[2].forward

    def forward(x: Tensor) -> Tensor:
        model[2].calls = getattr(model[2], "calls", 0) + 1  # type: ignore[assignment]
        return found(x)

    model[2].forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "tape, change, dropout, reason",
    [
        (Broken, None, 0.0, "CUDA cannot record it (operation not permitted"),
        (Full, None, 0.0, "there is not enough"),
        (Wrong, None, 0.0, "its gradient differs from that of eager code by 1.0e+00 of it"),
        (Again, hooked, 0.0, "0 has forward hooks"),
        (Again, counting, 0.0, "its forward changes ReLU.calls"),
        (Again, None, 0.5, "it draws random numbers on the host"),
    ],
)
def test_what_cannot_be_recorded_runs_by_threads(
    tape: Any, change: Any, dropout: float, reason: str
) -> None:
    model = normed(dropout)
    if change is not None:
        change(model)
    whole = Whole(model, loss=mean)
    train, recorder = training(model, asked=True, tape=tape)
    with pytest.warns(ExecuteWarning, match="Micro-steps run by threads instead") as said:
        train.step(batch(9, 0))
    assert reason in str(said[0].message)
    if not dropout:
        whole.step(batch(9, 0))
        for seed in (1, 2):
            train.step(batch(9, seed))
            whole.step(batch(9, seed))
            assert recorder.mode == "threads"
        assert distance(model.parameters(), whole.model.parameters()) <= EXACT
        assert distance(buffers(model), buffers(whole.model)) <= EXACT
    else:
        train.step(batch(9, 1))


def test_running_out_of_memory_lets_go_of_the_recordings_first() -> None:
    """Before lock-step holds less, or the window is cut into smaller micro-batches."""
    model = normed()
    whole = Whole(model, loss=mean)

    def tight(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        if len(micro["y"]) == 2 and recorder._recordings:
            raise torch.OutOfMemoryError("as if")
        return loss(model, micro)

    train, recorder = training(model, asked=True, loss=tight)
    train.step(batch(9, 0))
    assert len(recorder._recordings) == 1
    step = train.step(batch(8, 1))  # 3, 3 and 2: another kind
    assert step.micro_batches == 3
    assert train.recoveries == 0
    assert recorder._lock_step.holding == "graphs"
    for seed, size in ((0, 9), (1, 8)):
        whole.step(batch(size, seed))
    assert distance(model.parameters(), whole.model.parameters()) <= EXACT
