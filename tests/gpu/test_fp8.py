"""fp8 on a Hopper GPU: its kernels against torch's operations, its windows against one another."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.compile.gradient_buffers import Casts
from wholebatch.window import fp8
from wholebatch.window import precision as precisions

DEVICE = torch.device("cuda")


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        raise SkipTest("needs a Hopper GPU or a newer one")


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_both_layouts_are_those_of_the_rows() -> None:
    needs_fp8()
    torch.manual_seed(0)
    for shape in ((1, 16), (33, 48), (128, 4096), (5632, 2048)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(shape, device=DEVICE) * torch.randn(shape[1], device=DEVICE).exp()
            weight = weight.to(dtype)
            found = fp8.Quantised.empty(weight)
            found.fill(weight)
            wanted = *fp8.quantise(weight), *fp8.quantise(weight.t().contiguous())
            assert all(_same(*pair) for pair in zip(found, wanted, strict=True)), (shape, dtype)


def test_products_do_not_depend_on_the_number_of_rows() -> None:
    needs_fp8()
    torch.manual_seed(0)
    x = torch.randn(2048, 1024, device=DEVICE).bfloat16()
    weight = fp8.Quantised(*fp8.quantise_weight(torch.randn(512, 1024, device=DEVICE)))
    rows, scales = fp8.quantise(x)
    right = weight.rows, weight.row_scales, torch.bfloat16
    made = fp8.product(rows, scales, *right)
    exact = (rows.double() * scales) @ (weight.rows.double() * weight.row_scales).t()
    assert _distance(made, exact) <= 4e-3
    for number in (0, 48, 1024, 1365):
        part = fp8.product(rows[:number], scales[:number], *right)
        assert part.shape == (number, 512)
        assert torch.equal(part, made[:number])


class Net(nn.Module):
    """Three perceptrons with a residual, over tokens.

    With a bias in the output layer, cuBLAS adds its bf16 products up in parts for some numbers of
    rows, so that the logits of a sample depend on the number of samples beside it.
    """

    def __init__(self, outputs: int = 96, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(outputs, 256)
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(256, 1024) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(1024, 256, bias=False) for _ in range(3))
        self.read = nn.Linear(256, outputs, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        logits: Tensor = self.read(x)
        return logits


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def gradient(model: nn.Module, batch: Any, **options: Any) -> tuple[Tensor, str]:
    model = copy.deepcopy(model)
    train = wb.WholeBatch(model, None, loss=loss, **options)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        train.gradient(batch)
    made = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return made, train._runner.executor.mode


def test_the_gradient_is_that_of_the_whole_batch_and_as_near_to_fp32_as_fp8_allows() -> None:
    needs_fp8()
    model = Net().to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    batch = {name: torch.randint(96, (12, 128), generator=generator).to(DEVICE) for name in "xy"}
    eager: dict[str, Any] = {"precision": "fp8", "execute": "eager"}
    whole, _ = gradient(model, batch, micro_batch=12, **eager)
    for size in (6, 5, 1):
        split, _ = gradient(model, batch, micro_batch=size, **eager)
        assert _distance(split, whole) <= 4e-3, size  # eager weight gradients are bf16
    recorded, mode = gradient(model, batch, micro_batch=4, precision="fp8", execute="graph")
    assert mode == "graph of compile"
    full, _ = gradient(model, batch, micro_batch=12, execute="eager")
    noise = _distance(whole, full)
    assert 1e-3 <= noise <= 0.2
    assert _distance(recorded, full) <= 1.25 * noise


def test_memory_is_not_above_that_of_bf16() -> None:
    needs_fp8()
    peaks = {}
    generator = torch.Generator().manual_seed(2)
    batch = {name: torch.randint(96, (8, 512), generator=generator).to(DEVICE) for name in "xy"}
    for precision in ("bf16", "fp8"):
        gc.collect()  # A window is in reference cycles, and so is the model that it had.
        before = torch.cuda.memory_allocated()
        model = Net().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        options: dict[str, Any] = {"precision": precision, "execute": "eager", "micro_batch": 2}
        train = wb.WholeBatch(model, optimizer, loss=loss, **options)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            train.step(batch)
        peaks[precision] = torch.cuda.max_memory_allocated() - before
        del train, model, optimizer
    print(f"  {peaks}")
    # Above it are the scales, and the largest input or output of a layer in 8 bits: 2 x 512 x 1024.
    assert peaks["fp8"] <= peaks["bf16"] + 2**20 + 2**17, peaks


def test_it_is_chosen_by_name() -> None:
    needs_fp8()
    assert precisions.choose("fp8", "cuda", models=[Net().to(DEVICE)]).name == "fp8"


def test_recorded_quantisation_follows_the_weights() -> None:
    needs_fp8()
    weights = [nn.Parameter(torch.randn(96, 64, device=DEVICE)) for _ in range(3)]
    casts = Casts(weights)
    wanted = [(index, part) for index in range(3) for part in range(4)]
    made = casts.of(wanted)
    assert casts._recorded is None
    for window in range(5):
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.7).add_(0.1)
        if window == 3:  # In other memory.
            weights[1].data = weights[1].data.clone()
        casts.refresh()
        assert (casts._recorded is None) == (window == 3)
        for index, weight in enumerate(weights):
            parts = fp8.Quantised.empty(weight)
            parts.fill(weight.detach())
            found = made[4 * index : 4 * index + 4]
            assert all(_same(*pair) for pair in zip(found, parts, strict=True))


def test_a_compiled_loss_in_an_own_loop() -> None:
    needs_fp8()
    generator = torch.Generator().manual_seed(2)
    batch = {name: torch.randint(96, (12, 128), generator=generator).to(DEVICE) for name in "xy"}
    model = Net().to(DEVICE)
    whole, _ = gradient(model, batch, micro_batch=12, precision="fp8", execute="eager")
    full, _ = gradient(model, batch, micro_batch=12, execute="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # Every window has the same gradient.
    made: list[Tensor] = []

    def keep(named: Any) -> None:
        made.append(torch.cat([p.grad.flatten() for _, p in named]))

    how: Any = {"execute": "graph", "precision": "fp8", "close": wb.Close(on_gradient=keep)}
    acc = wb.Accumulator(model, optimizer, steps=3, **how)
    of_micro = partial(loss, model)
    for _ in range(4):
        for start in (0, 4, 8):
            acc.run(of_micro, {k: v[start : start + 4] for k, v in batch.items()})
    assert acc._functions[of_micro].executor.mode == "graph of compile"
    noise = _distance(whole, full)
    # The first window runs eagerly, from a power of two: its 8-bit roundings are other ones.
    assert _distance(made[0], full) <= 1.25 * noise
    assert _distance(made[-1], full) <= 1.25 * noise
