"""A loss in slices, eager and recorded, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import steps_of
from wholebatch.losses import sliced_cross_entropy

DEVICE = torch.device("cuda")


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_a_loss_in_slices_adds_its_gradients_by_products_eager_and_recorded() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5000, (4, 1025), generator=generator)

    def trained(execute: str, dtype: torch.dtype) -> tuple[Model, wb.WholeBatch]:
        torch.manual_seed(0)
        model = Model().to(DEVICE, dtype)
        precision = "bf16" if dtype is torch.float32 else "full"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=wb.causal_lm,
            micro_batch=2,
            precision=precision,
            execute=execute,  # type: ignore[arg-type]
        )
        for _ in range(3):
            train.step({"input_ids": tokens})
        train.gradient({"input_ids": tokens})
        return model, train

    def rows_at_once(_: int) -> int:  # Dynamo cannot follow a Mock.
        return 384

    with mock.patch.object(sliced_cross_entropy, "rows_at_once", rows_at_once):
        exact, _ = trained("eager", torch.float64)
        eager, train = trained("eager", torch.float32)
        recorded, train = trained("graph", torch.float32)
    [step] = steps_of(train).values()
    assert step.captured
    assert step.joint.fused["products"] >= 2 * 1024 // 384  # every slice's product adds itself
    for model in (eager, recorded):
        for ours, right in zip(model.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None
            assert right.grad is not None
            assert _distance(ours.grad, right.grad) <= 1e-2


class Body(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


@dataclass
class Output:
    logits: Tensor


class Model(nn.Module):
    """Shaped like a language model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Body(5000, 256)
        self.head = nn.Linear(256, 5000, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.head(self.base_model(input_ids)))
