"""The close of a window by its parts, beside one pass over memory, on one CUDA device.

    python benchmarks/gpu_close.py                      # GPTs of 124 M and 1.3 B parameters
    python benchmarks/gpu_close.py --models gpt-124m

A window in graphs ends and begins with four passes: the norm of the gradients, torch's fused AdamW
(which multiplies by the factor, and writes the gradients back), the clearing of the gradients, and
the cast of the weights to bf16. `one kernel` makes the last three of them over all parameters at
once, in Triton; in the last row it leaves the gradients and casts alone. Both start from the same
numbers; after five windows the parameters, moments and casts are compared. Times are medians over
windows, by the device's own clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: E402
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: E402
from speed.models import CASES  # noqa: E402
from triton.language.extra import libdevice  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: E402

from wholebatch.compile.gradient_buffers import in_one_piece  # noqa: E402

BLOCK, BLOCKS, WARPS = (int(one) for one in os.environ.get("TILE", "1024 8 4").split())
"""Numbers that a program has in registers at once, how often it reads as many, and its warps."""
DECAY, EPSILON, RATE, BETAS = 0.01, 1e-8, 1e-3, (0.9, 0.999)
MEASURED = 12


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _close(  # type: ignore[no-untyped-def]
    tensors, places, scale, bad, rate, beta1, beta2, decay, epsilon,
    clears: tl.constexpr, casts: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Step AdamW on one piece of a parameter as torch does, clear its gradient, cast its weight."""
    if tl.load(bad) != 0.0:
        return
    place = places + 2 * tl.program_id(0)
    row = tensors + 7 * tl.load(place)
    first = tl.load(place + 1).to(tl.int64) * block * blocks
    p = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    g = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    m = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    v = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    cast = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)), 16)
    step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
    length = tl.load(row + 6)
    by = tl.load(scale)
    size = tl.div_rn(rate, 1.0 - libdevice.pow(beta1, step))
    root = tl.sqrt_rn(1.0 - libdevice.pow(beta2, step))
    for number in range(blocks):
        here = first + number * block + tl.arange(0, block)
        inside = here < length
        grad = tl.div_rn(tl.load(g + here, mask=inside), by)
        weight, mean = tl.load(p + here, mask=inside), tl.load(m + here, mask=inside)
        square = tl.load(v + here, mask=inside)
        weight = weight - rate * decay * weight
        mean = tl.fma(beta1, mean, tl.fma(-beta1, grad, grad))
        square = tl.fma(beta2, square, tl.fma(-beta2, grad * grad, grad * grad))
        below = tl.div_rn(tl.sqrt_rn(square), root) + epsilon
        weight = weight - tl.div_rn(size * mean, below)
        tl.store(p + here, weight, mask=inside)
        if clears:
            tl.store(g + here, tl.zeros([block], tl.float32), mask=inside)
        tl.store(m + here, mean, mask=inside)
        tl.store(v + here, square, mask=inside)
        if casts:
            tl.store(cast + here, weight.to(tl.bfloat16), mask=inside)


class OnePass:
    """The addresses of all tensors, and which program works on which piece."""

    def __init__(self, columns: Sequence[Sequence[Tensor]]) -> None:
        rows = [[*(one.data_ptr() for one in row), row[0].numel()] for row in columns]
        piece = BLOCK * BLOCKS
        places = [(n, k) for n, row in enumerate(rows) for k in range(-(-row[-1] // piece))]
        self._tensors = torch.tensor(rows, device="cuda")
        self._places = torch.tensor(places, dtype=torch.int32, device="cuda")
        self._steps = [row[5] for row in columns]

    def __call__(
        self, scale: Tensor, bad: Tensor, *, clears: bool = True, casts: bool = True
    ) -> None:
        torch._foreach_add_(self._steps, 1.0)
        kernel: Any = _close[(len(self._places),)]
        given = self._tensors, self._places, scale, bad, RATE, *BETAS, DECAY, EPSILON
        sizes: Any = {"block": BLOCK, "blocks": BLOCKS, "num_warps": WARPS}
        kernel(*given, clears=clears, casts=casts, **sizes)


class Model:
    """Parameters, moments, gradients and casts of a model, as a window in graphs has them."""

    def __init__(self, name: str) -> None:
        with torch.device("meta"):
            shapes = [one.shape for one in CASES[name].build().parameters()]
        torch.manual_seed(0)
        self.weights = [torch.nn.Parameter(torch.randn(s, device="cuda") * 0.02) for s in shapes]
        like: list[Tensor] = list(self.weights)
        self.gradients = in_one_piece(like, [torch.float32] * len(like))
        self.casts = in_one_piece(like, [torch.bfloat16] * len(like))
        options: Any = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
        self.optimizer: Any = torch.optim.AdamW(self.weights, fused=True, **options)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = gradient
        self.bad = torch.zeros((), device="cuda")
        self.scale = torch.full((), 3.0, device="cuda")
        self.optimizer.step()  # It makes the moments.
        states = [self.optimizer.state[one] for one in self.weights]
        self.one_pass = OnePass(
            [
                (w.data, g, s["exp_avg"], s["exp_avg_sq"], c, s["step"])
                for w, g, c, s in zip(self.weights, self.gradients, self.casts, states, strict=True)
            ]
        )

    def make_gradients(self, seed: int) -> None:
        torch.manual_seed(seed)
        for gradient in self.gradients:
            gradient.normal_()

    def norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(self.gradients)

    def step(self) -> None:
        self.optimizer.grad_scale, self.optimizer.found_inf = self.scale, self.bad
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf

    def step_without_factor(self) -> None:
        self.optimizer.found_inf = self.bad
        self.optimizer.step()
        del self.optimizer.found_inf

    def clear(self) -> None:
        torch._foreach_zero_(self.gradients)

    def cast(self) -> None:
        torch._foreach_copy_(self.casts, [one.data for one in self.weights])

    def as_now(self) -> None:
        self.step()
        self.clear()
        self.cast()

    def in_one(self) -> None:
        self.one_pass(self.scale, self.bad)

    def step_alone(self) -> None:
        self.one_pass(self.scale, self.bad, clears=False, casts=False)

    def numbers(self) -> dict[str, Tensor]:
        """Everything that a close has written, as rows."""
        states = [self.optimizer.state[one] for one in self.weights]
        of: dict[str, list[Tensor]] = {
            "parameters": [one.data for one in self.weights],
            "first moments": [one["exp_avg"] for one in states],
            "second moments": [one["exp_avg_sq"] for one in states],
            "casts": self.casts,
            "gradients": self.gradients,
        }
        return {name: torch.cat([one.flatten() for one in some]) for name, some in of.items()}


def milliseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(MEASURED):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # The host is ahead of the device, as in a window.
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return float(statistics.median(times))


def compare(name: str) -> None:
    """Print how many numbers of five windows differ, and by how many units in the last place."""
    found = []
    for close in (Model.as_now, Model.in_one):
        model = Model(name)
        for seed in range(5):
            model.make_gradients(seed)
            close(model)
        found.append(model.numbers())
        del model
    for what, wanted in found[0].items():
        other = found[1][what]
        bits = torch.int16 if wanted.dtype is torch.bfloat16 else torch.int32
        apart = (wanted.view(bits).long() - other.view(bits).long()).abs()
        share = float((apart > 0).double().mean())
        far = float((wanted - other).double().norm() / wanted.double().norm().clamp(min=1e-300))
        print(f"  {what}: {share:.1e} differ, at most {int(apart.max())} ulp, {far:.1e} in L2")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-124m", "gpt-1.3b"])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in options.models:
        model = Model(name)
        count = sum(one.numel() for one in model.weights)
        print(f"{name}: {count / 1e6:.0f} M parameters, {len(model.weights)} tensors")
        model.make_gradients(0)
        for label, part in (
            ("norm", model.norm),
            ("AdamW, fused by torch", model.step),
            ("the same without a factor", model.step_without_factor),
            ("clearing of gradients", model.clear),
            ("cast of weights", model.cast),
            ("AdamW, clearing, cast", model.as_now),
            ("one kernel", model.in_one),
            ("the kernel's AdamW alone", model.step_alone),
        ):
            print(f"  {label:26s} {milliseconds(part):7.3f} ms", flush=True)
        del model, part
        torch.cuda.empty_cache()
        if count < 2e8:
            compare(name)


if __name__ == "__main__":
    main()
