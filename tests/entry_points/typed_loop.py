"""What a type checker says of a loop: batches keep their type, a loss needs units.

`make check` runs mypy on this file: an ignore without an error is an error too.
"""

import torch
from typing_extensions import assert_type

import wholebatch as wb
from wholebatch.integrations.lightning import FabricAccumulator
from wholebatch.integrations.transformers import exact

Pair = tuple[torch.Tensor, str]


def train(model: torch.nn.Module, loader: list[Pair]) -> None:
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters()), steps=4)
    for micro in acc.over(loader):
        assert_type(micro, Pair)
        loss = torch.as_tensor(model(micro[0]))
        acc.backward(loss)  # type: ignore[call-overload]
        acc.backward(mean=loss)  # type: ignore[call-overload]
        acc.backward(loss, mean=loss, units=3)  # type: ignore[call-overload]
        acc.backward()  # type: ignore[call-overload]
        acc.backward(loss, units=3)
        acc.backward(loss, 3, last=True)
        acc.backward(mean=loss, units=loss)
        assert_type(acc.backward(wb.Loss(loss, 3), more=True), wb.Step | None)
    for micro in wb.over(loader, acc):
        assert_type(micro, Pair)
    whole = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), loss=wb.causal_lm)
    for batch in whole.over(loader):
        assert_type(batch, Pair)


class Trainer:
    """One with the methods of Transformers' Trainer."""

    def training_step(self) -> None: ...


def with_a_trainer() -> None:
    assert_type(exact(Trainer), type[Trainer])
    exact(Trainer, mikro_batch=4)  # type: ignore[call-arg]


def with_fabric(windows: FabricAccumulator, loss: torch.Tensor) -> None:
    windows.backward(loss, last=True)  # type: ignore[call-overload]
    windows.backward(mean=loss, units=3, last=True)
