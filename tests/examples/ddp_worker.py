"""Two ranks run examples/train_ddp.py in float64 until its first update, and compare it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.examples.first_update import first_update, float64
from tests.support import distance

STEPS = 3
run = first_update("train_ddp", "--steps", str(STEPS))
gathered: list[list[list[Tensor]]] = [[], []]
dist.all_gather_object(gathered, run.batches[:STEPS])
micros = [micro for rank in gathered for micro in rank]


def mean(model: nn.Module, words: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), tags.flatten())


def loss(model: nn.Module) -> Tensor:
    words, tags = (torch.cat(part) for part in zip(*micros, strict=True))
    return mean(model, words, tags)


if dist.get_rank() == 0:
    with float64():
        model = run.names["make_model"]()
        [update] = run.updates
        gradient, moved = update.errors(model, loss, clip_norm=1.0)
        parameters = list(model.parameters())
        right = torch.autograd.grad(loss(model), parameters)
        each = [torch.autograd.grad(mean(model, *micro), parameters) for micro in micros]
    usual = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    print(f"gradient {gradient} update {moved} usual {distance(usual, right)}")
dist.destroy_process_group()
