"""fp8 windows: the update of the undivided batch in the same arithmetic, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import Micro, loss, mean_of_tokens, tagged, traced
from tests.support import Seen, distance, sgd
from wholebatch.window import fp8
from wholebatch.window.fp8 import Fp8, eight_bit_layers
from wholebatch.window.precision import choose

pytestmark = pytest.mark.slow
LAYERS = ("query", "key", "out")


class Net(nn.Module):
    """Two layers that share an input, one with a bias, and an output layer."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.checkpoints = checkpoints
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.query = nn.Linear(16, 32)
        self.key = nn.Linear(16, 32, bias=False)
        self.out = nn.Linear(32, 16)
        self.read = nn.Linear(16, 11)

    def block(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        added: Tensor = x + self.out(torch.tanh(self.query(inner)) * self.key(inner))
        return added

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        logits: Tensor = self.read(x)
        return logits


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8, "anywhere", True)
    monkeypatch.setattr(Fp8, "least", 16)


def rounded(rows: Tensor) -> Tensor:
    """Each row rounded to 8 bits by a power of two, by Python's arithmetic."""
    made = []
    for row in rows:
        largest = float(row.abs().max())
        scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        made.append((row / scale).float().to(torch.float8_e4m3fn).to(rows.dtype) * scale)
    return torch.stack(made)


class Rounded(torch.autograd.Function):
    """A linear layer in the same arithmetic, written down apart from the package."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        made = rounded(x.flatten(0, -2)) @ rounded(weight).t()
        return made.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = rounded(dy.flatten(0, -2)) @ rounded(weight.t()).t()
        return dx.unflatten(0, x.shape[:-1]), dy.flatten(0, -2).t() @ x.flatten(0, -2)


def undivided(model: nn.Module, micro: Micro) -> Tensor:
    """The mean loss of a batch, in the arithmetic of `Rounded`."""

    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        y = Rounded.apply(x, layer.weight)
        return y if layer.bias is None else y + layer.bias

    layers = [model.get_submodule(name) for name in LAYERS]
    for layer in layers:
        layer.forward = run.__get__(layer)
    try:
        return mean_of_tokens(model, micro)
    finally:
        for layer in layers:
            del layer.forward


def started(how: str, model: nn.Module, micro_batch: int, *, counts: bool = True) -> wb.WholeBatch:
    options: dict[str, Any] = {"loss": loss, "micro_batch": micro_batch, "precision": "fp8"}
    if counts:  # The backward then starts from 1 / units, as that of the mean does.
        options["units"] = lambda micro: (micro["y"] != -100).sum()
    if how == "traced":
        return traced(model, **options)
    return wb.WholeBatch(model, sgd(model), execute="eager", **options)


def test_a_stream_makes_the_same_update_for_every_split() -> None:
    """Its backwards start from a power of two, which the scales of rows take up."""
    models = {size: Net().double() for size in (10, 7, 3, 1)}
    for size, model in models.items():
        train = started("eager", model, size, counts=False)
        for _ in range(2):
            train.step(tagged(10))
    whole, *others = models.values()
    assert all(distance(one.parameters(), whole.parameters()) <= 1e-12 for one in others)


def test_weights_are_quantised_once_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[torch.Size] = []
    fill = fp8.Quantised.fill

    def counted(self: fp8.Quantised, weight: Tensor) -> None:
        filled.append(weight.shape)
        fill(self, weight)

    monkeypatch.setattr(fp8.Quantised, "fill", counted)
    for how in ("eager", "traced"):
        model = Net().double()
        train = started(how, model, 2)
        for _ in range(4):  # These look, trace and check; the fifth window compares nothing.
            train.step(tagged(10))
        filled.clear()
        train.step(tagged(10))
        assert len(filled) == len(LAYERS), how


def test_rows_are_scaled_by_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 32, generator=generator)
    rows *= torch.randint(-90, 90, (64, 1), generator=generator).float().exp2()
    rows[0], rows[1, 0], rows[2] = 0.0, 448.0, 0.0
    rows[1, 1:] = 0.0
    rows[2, 5] = 448.0 * (1 + 2.0**-20)
    made, scales = fp8.quantise(rows)
    assert torch.equal(scales.log2().round().exp2(), scales)
    sizes = rows[1:].abs().amax(1, keepdim=True) / scales[1:]
    assert float(sizes.min()) > 224
    assert float(sizes.max()) <= 448
    assert not made[0].float().any()
    assert float(scales[1]) == 1.0
    assert float(scales[2]) == 2.0
    assert torch.equal(made.float() * scales, rounded(rows))
    for wrong in (math.inf, math.nan):
        rows[3, 3] = wrong
        made, scales = fp8.quantise(rows)
        assert scales.isnan().sum() == 1
        assert scales[3].isnan()


def test_both_layouts_hold_the_weight() -> None:
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    made = fp8.Quantised(*fp8.quantise_weight(weight))
    assert made.rows.shape == (32, 16)
    assert made.columns.shape == (16, 32)
    assert torch.equal(made.rows.float() * made.row_scales, rounded(weight))
    assert torch.equal(made.columns.float() * made.column_scales, rounded(weight.t()))
    torch.library.opcheck(fp8.quantise_weight, (weight,))


def test_sixteen_bit_numbers_around_the_products() -> None:
    """float32 weights under autocast: eager code and the graph compute the same to rounding."""
    models = [Net() for _ in range(3)]
    steps = [
        started("eager", models[0], 4).step(tagged(10)),
        started("traced", models[1], 4).step(tagged(10)),
    ]
    bf16: dict[str, Any] = {"loss": loss, "micro_batch": 4, "precision": "bf16"}
    wb.WholeBatch(models[2], sgd(models[2]), execute="eager", **bf16).step(tagged(10))
    first = list(Net().parameters())
    updates = [
        [a.detach() - b.detach() for a, b in zip(model.parameters(), first, strict=True)]
        for model in models
    ]
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-2)
    assert distance(updates[1], updates[0]) <= 1e-2
    assert 1e-3 <= distance(updates[0], updates[2]) <= 0.1


def test_a_forward_without_autocast_is_plain() -> None:
    """Code that switches autocast off for a part gets the layer as written."""
    model = Net()
    precision = choose("fp8", "cpu", models=[model])
    x = torch.randn(3, 16)
    with precision.forward():
        eight = model.query(x)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model.query(x), nn.functional.linear(x, *model.query.parameters()))
    assert eight.dtype is torch.bfloat16


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model, x = Net(), torch.randn(3, 16, requires_grad=True)
    with choose("fp8", "cpu", models=[model]).forward():
        total = model.query(x).square().sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_which_layers_compute_in_8_bits() -> None:
    model = Net()

    def names(of: nn.Module, least: int = 16) -> list[str]:
        layers = eight_bit_layers(of, least)
        return [name for name, one in of.named_modules() if any(one is it for it in layers)]

    assert names(model) == list(LAYERS)
    assert names(model, 32) == []
    model.query.weight.requires_grad_(False)
    model.read = nn.Linear(16, 16)
    model.read.weight = model.key.weight = nn.Parameter(torch.zeros(16, 16))
    assert names(model) == ["out"]
    model = Net()
    model.get_output_embeddings = lambda: model.query  # type: ignore[attr-defined]
    model.read = nn.Linear(16, 32)
    assert names(nn.Sequential(model)) == ["0.key", "0.out", "0.read"]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(model: nn.Module, **options: Any) -> None:
        wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, precision="fp8", **options)

    with pytest.raises(wb.errors.OptionError, match="no layer can use it"):
        made(nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 3)))
    with pytest.raises(wb.errors.OptionError, match="scaler= with precision='fp8'"):
        made(Net(), close=wb.Close(scaler=torch.amp.GradScaler("cpu")))
    with pytest.raises(wb.errors.UnsupportedError, match="free them after each micro-batch"):
        choose("fp8", "cpu", keeps=False, models=[Net()])
    monkeypatch.setattr(Fp8, "anywhere", False)
    with pytest.raises(wb.errors.UnsupportedError, match=r"on cpu: .* 9\.0 or higher .*'bf16'"):
        made(Net())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(nn.Module, "parameters", lambda _: iter([_OnCuda]))
    with pytest.raises(wb.errors.UnsupportedError, match="on A100: it needs"):
        Fp8([nn.Module()])


class _OnCuda:
    device = torch.device("cuda")


def test_verify_states_it_and_the_distance_to_float64() -> None:
    verdict = wb.verify(Net(checkpoints=True), loss, tagged(10), micro_batch=4, precision="fp8")
    assert verdict.same
    assert verdict.precision == "fp8"
    assert verdict.to_float64 is not None
    whole, ours = verdict.to_float64
    assert 1e-2 < whole < 0.2
    assert ours <= 1.25 * whole


def test_a_copy_made_within_a_window_computes_by_itself() -> None:
    model = Net()
    precision = choose("fp8", "cpu", models=[model])
    with precision.window():
        other = copy.deepcopy(model)
        assert other.query.forward.__self__ is other.query
    seen = Seen(model, sgd(model))
    assert not seen.gradients
    assert "forward" not in vars(model.query)
