"""The text of a loop with two optimizers, and what its undivided batches give: a GAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.programs.plain.loop import Loop
from tests.programs.plain.text import OPTIMIZERS, Text

LEAK = "the generator's loss in the discriminator"


class PairText(Text):
    """The parts of a GAN's loop: x are real samples, y is noise."""

    def optimizers(self) -> list[str]:
        call = OPTIMIZERS[self.loop.optimizer]
        return [
            "optimizer_d = " + call.format(*["discriminator.parameters()"] * 2),
            "optimizer_g = " + call.format(*["generator.parameters()"] * 2),
        ]

    def micro_batch(self, boundary: str = "") -> list[str]:
        by = "" if self.is_planted("not divided") else f" / {self._divisor()}"
        lines = ['x, y = batch["x"], batch["y"]'] if self.loop.batch == "dict" else []
        if self.is_planted("cleared per micro-batch"):
            lines += self.clear()
        fake = "real, fake = discriminator(x), discriminator(generator(y).detach())"
        real = "F.binary_cross_entropy_with_logits(real, torch.ones_like(real))"
        ones = "F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))"
        zeros = "F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))"
        if self.loop.style == "inline":
            lines += [fake, f"loss_d = {real} + {zeros}", f"(loss_d{by}).backward()"]
        else:
            lines += [fake, f"errors_real = {real}{by}", "errors_real.backward()"]
            lines += [f"errors_fake = {zeros}{by}", "errors_fake.backward()"]
        off, on = (f"discriminator.requires_grad_({value})" for value in (False, True))
        judged = [
            "fooled = discriminator(generator(y))",
            f"loss_g = {ones}",
            f"(loss_g{by}).backward()",
        ]
        return [*lines, *(judged if self.is_planted(LEAK) else [off, *judged, on])]

    def clear(self) -> list[str]:
        return ["optimizer_d.zero_grad()", "optimizer_g.zero_grad()"]

    def close(self, pending: str = "") -> list[str]:
        steps = ["optimizer_d.step()", "optimizer_g.step()"]
        is_cleared = self.loop.clear == "after" and not self.is_planted("never cleared")
        return [*steps, *(self.clear() if is_cleared else [])]


def undivided_pair(
    loop: Loop, scope: dict[str, Any], windows: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Make the steps of the undivided batches; a recorder sees them."""
    generator, discriminator = scope["generator"], scope["discriminator"]
    for x, y in windows:
        real, fake = discriminator(x), discriminator(generator(y).detach())
        loss = _bce(real, 1.0) + _bce(fake, 0.0)
        of_d = torch.autograd.grad(loss, [*discriminator.parameters()])
        of_g = torch.autograd.grad(
            _bce(discriminator(generator(y)), 1.0), [*generator.parameters()]
        )
        for model, gradients in ((discriminator, of_d), (generator, of_g)):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
        scope["optimizer_d"].step()
        scope["optimizer_g"].step()


def _bce(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
