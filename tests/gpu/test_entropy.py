"""The kernel of a cross-entropy with its gradient, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import steps_of
from wholebatch.compile.cross_entropy import _operation, can_fuse_entropy
from wholebatch.compile.token_statistics import token_statistics
from wholebatch.losses import sliced_cross_entropy

DEVICE = torch.device("cuda")


def _in_float64(logits: Tensor, labels: Tensor, seed: float) -> tuple[Tensor, Tensor]:
    exact = logits.double().requires_grad_()
    rows = functional.cross_entropy(exact, labels, reduction="none")
    [gradient] = torch.autograd.grad(rows.sum() * seed, exact)
    return rows.detach(), gradient


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_every_dtype_and_width_is_as_near_to_float64_as_its_rounding() -> None:
    torch.manual_seed(0)
    limits = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
    for classes in (1, 7, 1000, 16384, 50304, 128256):
        for dtype, limit in limits.items():
            logits = (torch.randn(37, classes, device=DEVICE) * 4).to(dtype)
            labels = torch.randint(0, classes, (37,), device=DEVICE)
            labels[::5] = -100
            labels[1] = classes - 1
            seed = torch.full((), 0.25, device=DEVICE)
            rows, gradient = _in_float64(logits, labels, 0.25)
            found = _operation()(logits, labels, seed, -100)
            if classes > 1:  # of one class, loss and gradient are zero
                assert _distance(found, rows) <= 1e-6, (classes, dtype)
                assert _distance(logits, gradient) <= limit, (classes, dtype)
            else:
                assert float(found.abs().max()) <= 1e-6
                assert float(logits.abs().max()) <= 1e-6
            assert not logits[::5].any()
            assert not found[::5].any()


def test_labels_out_of_range_and_infinite_logits_are_not_finite() -> None:
    logits = torch.randn(4, 100, device=DEVICE)
    logits[2, 5] = torch.inf
    labels = torch.tensor([100, -3, 7, 8], device=DEVICE)
    rows = _operation()(logits, labels, torch.ones((), device=DEVICE), -100)
    assert rows.isfinite().tolist() == [False, False, False, True]


def test_the_statistics_of_rows_are_those_of_float64() -> None:
    torch.manual_seed(0)
    for classes in (1, 7, 1000, 16384, 128256):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            logits = (torch.randn(37, classes, device=DEVICE) * 4).to(dtype)
            logits[3, classes // 2 :] = logits[3].max()  # the first of equal ones
            entropies, likeliest, means = token_statistics(logits)
            shares = logits.double().softmax(1)
            wanted = -(shares * shares.log()).sum(1)
            assert float((entropies - wanted).abs().max()) <= 1e-5, (classes, dtype)
            assert torch.equal(likeliest, logits.cpu().argmax(1).to(DEVICE))
            assert float((means - logits.double().mean(1)).abs().max()) <= 1e-5


def test_this_device_has_it() -> None:
    assert can_fuse_entropy(DEVICE)


def test_labels_that_are_a_column_of_a_wider_tensor() -> None:
    logits = torch.randn(6, 50, device=DEVICE)
    labels = torch.randint(0, 50, (6, 3), device=DEVICE)[:, 1]
    rows, gradient = _in_float64(logits, labels, 1.0)
    found = _operation()(logits, labels, torch.ones((), device=DEVICE), -100)
    assert _distance(found, rows) <= 1e-6
    assert _distance(logits, gradient) <= 1e-6


def test_rows_with_gaps_and_columns_side_by_side() -> None:
    for logits in (
        torch.randn(6, 56, device=DEVICE)[:, :50],
        torch.randn(50, 6, device=DEVICE).t(),
    ):
        labels = torch.randint(0, 50, (6,), device=DEVICE)
        rows, gradient = _in_float64(logits, labels, 1.0)
        found = _operation()(logits, labels, torch.ones((), device=DEVICE), -100)
        assert _distance(found, rows) <= 1e-6
        assert _distance(logits, gradient) <= 1e-6


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
