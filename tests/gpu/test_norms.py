"""The kernels of a layer norm's backward and of a GELU's, against float64."""

from __future__ import annotations

import warnings
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from wholebatch.compile import ExecuteWarning, gelu
from wholebatch.compile import layer_norm as norms

DEVICE = torch.device("cuda")


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_norms_of_every_width_are_as_near_to_float64_as_their_rounding() -> None:
    torch.manual_seed(0)
    shapes = (1, 7), (5, 64), (67, 300), (4099, 768), (1024, 2048), (40, 8192)
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for (rows, columns), dtype in product(shapes, dtypes):
        for is_rms in (False, True):
            x = torch.randn(rows, columns, device=DEVICE) * 2.0 + 1.0
            gradient = torch.randn(rows, columns, device=DEVICE).to(dtype)
            residual = torch.randn(rows, columns, device=DEVICE)
            weight = torch.randn(columns, device=DEVICE)
            addend = torch.randn(rows, columns, device=DEVICE).to(dtype)
            var, mean = torch.var_mean(x + addend, 1, correction=0, keepdim=True)
            rstd = (var + 1e-5).rsqrt()
            center = None if is_rms else mean
            given = gradient, x, addend, center, rstd, weight, residual
            out, low, sums = norms._operation()(*given, torch.bfloat16, [True] * 3, None)

            normal = ((x + addend).double() - (0.0 if is_rms else mean.double())) * rstd.double()
            scaled = gradient.double() * weight.double()
            along = 0.0 if is_rms else scaled.mean(1, keepdim=True)
            exact = scaled - along - normal * (scaled * normal).mean(1, keepdim=True)
            exact = exact * rstd.double() + residual.double()
            assert _distance(out, exact) <= 1e-6, (rows, columns, dtype)
            assert torch.equal(low, out.bfloat16())
            assert _distance(sums[0], (gradient.double() * normal).sum(0)) <= 1e-5
            assert _distance(sums[1], gradient.double().sum(0)) <= 1e-5
            assert _distance(sums[2], low.double().sum(0)) <= 1e-5
            for place in range(3):
                into = weight.clone()
                alone = [one == place for one in range(3)]
                again, *_ = norms._operation()(*given, torch.bfloat16, alone, into)
                assert torch.equal(again, out)
                assert _distance(into - weight, sums[place].double()) <= 1e-5


def test_norms_without_weight_residual_or_sums() -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 500, device=DEVICE)
    gradient = torch.randn(33, 500, device=DEVICE)
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    given = gradient, x, None, mean, rstd, None, None, None
    found, low, sums = norms._operation()(*given, [False] * 3, None)
    wanted = norms._by_operations(norms.Read(*given[:-1]), None, sums, [False] * 3, None)
    assert not low.numel()
    assert not sums.numel()
    assert _distance(found, wanted.double()) <= 1e-6


def test_gelus_of_every_number_are_within_a_rounding_of_float64() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32, device=DEVICE).to(torch.int16)
    x = numbers.view(torch.bfloat16)
    x = x[x.abs() <= 1e18]
    x = x[: x.numel() // 300 * 300].reshape(-1, 300)
    for approximate in ("tanh", "none"):
        exact = x.double().requires_grad_()
        made = functional.gelu(exact, approximate=approximate)
        [wanted] = torch.autograd.grad(made.sum(), exact)
        total = torch.ones(300, device=DEVICE)
        found = gelu._operation()(torch.ones_like(x), x, total, approximate)
        error = (found.double() - wanted).abs()
        assert bool((error <= wanted.abs() * 2.0**-8 + 1e-6).all())
        assert _distance(total, 1.0 + found.double().sum(0)) <= 1e-6


def test_this_device_has_them() -> None:
    assert norms.can_fuse_norms(DEVICE)
    assert gelu.can_fuse_gelu(DEVICE)


class Blocks(nn.Module):
    """Perceptrons on normalised input, each added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(101, 96)
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(96, 384) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(384, 96) for _ in range(3))
        self.read = nn.Linear(96, 101)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(functional.gelu(up(norm(x)), approximate="tanh"))
        logits: Tensor = self.read(self.norms[3](x))
        return logits


def _loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def _gradients(precision: str, execute: str) -> list[Tensor]:
    """Of an update from three micro-batches; a second one from the same has the same bits."""
    model = Blocks().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = wb.WholeBatch(
        model, optimizer, loss=_loss, micro_batch=4, precision=precision, execute=execute
    )
    tokens = torch.arange(12 * 33, device=DEVICE).remainder(97).reshape(12, 33)
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    kept: list[list[Tensor]] = []

    def look(*_: object) -> None:
        kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    optimizer.register_step_pre_hook(look)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the compiler's own
        warnings.simplefilter("error", ExecuteWarning)
        for _ in range(4):
            train.step(batch)
    first, *_ = kept[-1]
    assert first.shape == model.embed.weight.shape
    # Rows of an embedding's gradient are added in no order.
    for one, two in zip(kept[-2][1:], kept[-1][1:], strict=True):
        assert torch.equal(one, two)
    return kept[-1]


def test_compiled_and_recorded_they_give_the_gradients_of_eager_code() -> None:
    for precision, limit in (("full", 1e-5), ("bf16", 2e-2)):
        wanted = torch.cat([gradient.flatten() for gradient in _gradients(precision, "eager")])
        found = torch.cat([gradient.flatten() for gradient in _gradients(precision, "graph")])
        assert _distance(found, wanted.double()) <= limit, precision
