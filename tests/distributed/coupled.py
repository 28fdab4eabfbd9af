"""Losses of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.coupled.networks import resnet50
from tests.coupled.test_coupled_loss import LOSSES, Clip, batch, encode, mean_of
from tests.distributed.problem import outcome
from tests.support import Seen, distance

Batch = dict[str, Tensor]
SHARES = [8, 5]


class Both(nn.Module):
    """CLIP as DDP wants it: one forward for both towers."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, micro: Batch) -> Batch:
        return encode(self.clip, micro)


def mine(data: Batch) -> Batch:
    own = slice(0, SHARES[0]) if dist.get_rank() == 0 else slice(SHARES[0], None)
    return {name: leaf[own] for name, leaf in data.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def contrast(name: str, *, norm: bool = False) -> dict[str, float]:
    """The worst error of gradients (and buffers) over two updates."""
    reference, clip = Clip(norm=norm), Clip(norm=norm)
    plain = sgd(reference)
    theirs = Seen(reference, plain)
    model = DistributedDataParallel(Both(clip), broadcast_buffers=False)
    optimizer = sgd(model)
    ours = Seen(clip, optimizer)
    coupled = wb.Coupled(lambda m, micro: m(micro), lambda all: LOSSES[name](clip, all))
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=coupled,
        micro_batch=2 + dist.get_rank(),
        clip_norm=0.5,
    )
    for seed in range(2):
        data = batch(sum(SHARES), seed=seed)
        loss = mean_of(name)(reference, data)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        step = train.step(mine(data))
        assert abs(step.loss - float(loss)) <= 1e-12 * abs(float(loss)), (step.loss, float(loss))
        assert step.units == len(data["label"])
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    buffers = [[b.double() for b in m.buffers()] for m in (clip, reference)]
    return {
        "gradients": max(distance(*pair) for pair in pairs),
        "buffers": distance(*buffers) if norm else 0.0,
    }


def gathered_contrast() -> dict[str, float]:
    """The error of the update of FSDP2 with gathered parameters."""
    reference, clip = Clip(), Clip()
    for tower in (reference, clip):  # FSDP2 takes no parameter without a dimension
        tower.log_scale = nn.Parameter(tower.log_scale.detach().reshape(1))
    origin = [p.detach().clone() for p in reference.parameters()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(Both(clip), mesh=mesh)
    plain = sgd(reference)
    coupled = wb.Coupled(lambda m, micro: m(micro), lambda all: LOSSES["clip"](clip, all))
    train = wb.WholeBatch(
        model, sgd(model), loss=coupled, micro_batch=2, close=wb.Close(sync="gathered")
    )
    data = batch(sum(SHARES))
    mean_of("clip")(reference, data).backward()
    plain.step()
    train.step(mine(data))
    right = [p.detach() - o for p, o in zip(reference.parameters(), origin, strict=True)]
    whole = [cast(DTensor, p).full_tensor().detach() for p in clip.parameters()]
    return {"update": distance([w - o for w, o in zip(whole, origin, strict=True)], right)}


def refusals() -> list[str]:
    clip = Clip()
    model = DistributedDataParallel(Both(clip))
    local = wb.Coupled(
        lambda m, micro: m(micro),
        lambda all: wb.Loss(all["image"].square().sum() * (1 + dist.get_rank()), 1),
    )
    coupled = wb.Coupled(lambda m, micro: m(micro), lambda all: LOSSES["clip"](clip, all))
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def step(model: Any, loss: Any, batches: int = 1, **options: Any) -> str:
        def loop() -> None:
            train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2, **options)
            for data in train.over([mine(batch())] * batches):
                train.step(data)

        return outcome(loop)

    return [
        step(model, local),
        step(model, coupled, 2 if dist.get_rank() == 0 else 1),
        step(sharded, coupled, close=wb.Close(sync="hold")),
    ]


def network(make: Callable[[], nn.Module], side: int = 6) -> dict[str, float]:
    """Gradients and running statistics of exact BatchNorm, over the ranks' uneven shares."""
    results = []
    draw = torch.Generator().manual_seed(1)
    data = {
        "x": torch.randn(13, 3, side, side, generator=draw, dtype=torch.float64),
        "y": torch.randint(0, 5, (13,), generator=draw),
    }
    for ranks in (False, True):
        torch.manual_seed(2)
        inner = make().double()
        model: nn.Module = DistributedDataParallel(inner) if ranks else inner
        optimizer = sgd(model)
        recorded = Seen(inner, optimizer)
        if ranks:
            train = wb.WholeBatch(
                model,
                optimizer,
                loss=lambda m, micro: wb.cross_entropy(m(micro["x"]), micro["y"]),
                micro_batch=3 - dist.get_rank(),
            )
            train.step(mine(data))
        else:
            nn.functional.cross_entropy(model(data["x"]), data["y"]).backward()
            optimizer.step()
        results.append((recorded.gradients[0], [b.double() for b in inner.buffers()]))
    (right, buffers), (ours, own_buffers) = results
    return {"gradients": distance(ours, right), "buffers": distance(own_buffers, buffers)}


def report() -> dict[str, Any]:
    off = {name: contrast(name) for name in LOSSES}
    off["batchnorm"] = contrast("clip", norm=True)
    off["gathered"] = gathered_contrast()
    off["resnet-50"] = network(partial(resnet50, width=16), side=64)
    return {"off": off, "refused": refusals()}
