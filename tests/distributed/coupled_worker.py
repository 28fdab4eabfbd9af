"""Run under torchrun: losses of the global batch."""

from __future__ import annotations

import json
import sys
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
from tests.coupled.networks import NETWORKS, resnet50
from tests.coupled.test_coupled_loss import LOSSES, Clip, batch, encode, mean_of
from tests.support import Seen, distance
from wholebatch.distributed.ddp import Buckets

Batch = dict[str, Tensor]
SHARES = {2: [8, 5], 3: [3, 6, 4]}


class Both(nn.Module):
    """CLIP as DDP wants it: one forward for both towers."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, micro: Batch) -> Batch:
        return encode(self.clip, micro)


def mine(data: Batch) -> Batch:
    sizes = SHARES[dist.get_world_size()]
    start = sum(sizes[: dist.get_rank()])
    return {name: leaf[start : start + sizes[dist.get_rank()]] for name, leaf in data.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def contrast(name: str, *, norm: bool = False, micro_batch: int = 2) -> float:
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
        micro_batch=micro_batch + dist.get_rank(),
        clip_norm=0.5,
    )
    for seed in range(2):
        data = batch(sum(SHARES[dist.get_world_size()]), seed=seed)
        loss = mean_of(name)(reference, data)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        step = train.step(mine(data))
        assert abs(step.loss - float(loss)) <= 1e-12 * abs(float(loss)), (step.loss, float(loss))
        assert step.units == len(data["label"])
    found = [distance(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True)]
    if norm:
        pairs = [[b.double() for b in m.buffers()] for m in (clip, reference)]
        found.append(distance(pairs[0], pairs[1]))
    return max(found)


def gathered_contrast() -> float:
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
    data = batch(sum(SHARES[dist.get_world_size()]))
    mean_of("clip")(reference, data).backward()
    plain.step()
    train.step(mine(data))
    right = [p.detach() - o for p, o in zip(reference.parameters(), origin, strict=True)]
    whole = [cast(DTensor, p).full_tensor().detach() for p in clip.parameters()]
    return distance([w - o for w, o in zip(whole, origin, strict=True)], right)


def reductions() -> int:
    """How often gradients are reduced in a window of several micro-batches."""
    count = [0]
    plain = Buckets.reducing

    def counted(self: Buckets, **options: Any) -> Any:
        count[0] += 1
        return plain(self, **options)

    Buckets.reducing = counted  # type: ignore[method-assign]
    try:
        contrast("clip", micro_batch=1)
    finally:
        Buckets.reducing = plain  # type: ignore[method-assign]
    return count[0] // 2


def in_low_precision() -> float:
    """bf16 representations travel as they are: the distance to one process, also in bf16."""
    data = {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}
    grads = []
    for ranks in (False, True):
        clip = Clip().float()
        model: nn.Module = Both(clip)
        if ranks:
            model = DistributedDataParallel(model)
        optimizer = sgd(model)
        seen = Seen(clip, optimizer)
        coupled = wb.Coupled(lambda m, micro: m(micro), lambda all, c=clip: LOSSES["clip"](c, all))
        train = wb.WholeBatch(model, optimizer, loss=coupled, micro_batch=3, precision="bf16")
        train.step(mine(data) if ranks else data)
        grads.append(seen.gradients[0])
    return distance(grads[1], grads[0])


def refusals() -> list[str]:
    said = []
    clip = Clip()
    model = DistributedDataParallel(Both(clip))
    local = wb.Coupled(
        lambda m, micro: m(micro),
        lambda all: wb.Loss(all["image"].square().sum() * (1 + dist.get_rank()), 1),
    )
    try:
        wb.WholeBatch(model, sgd(model), loss=local, micro_batch=2).step(mine(batch()))
    except wb.errors.LossError as error:
        said.append(str(error))
    coupled = wb.Coupled(lambda m, micro: m(micro), lambda all: LOSSES["clip"](clip, all))
    train = wb.WholeBatch(model, sgd(model), loss=coupled, micro_batch=2)
    loader = [mine(batch())] * (2 if dist.get_rank() == 0 else 1)
    try:
        for data in train.over(loader):
            train.step(data)
    except wb.errors.RankError as error:
        said.append(str(error))
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
        wb.WholeBatch(
            sharded, sgd(sharded), loss=coupled, micro_batch=2, close=wb.Close(sync="hold")
        )
    except wb.errors.UnsupportedError as error:
        said.append(str(error))
    return said


def network(make: Callable[[], nn.Module], side: int = 6) -> float:
    """Gradients and running statistics of exact BatchNorm, over the ranks' uneven shares."""
    made = []
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
        seen = Seen(inner, optimizer)
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
        made.append((seen.gradients[0], [b.double() for b in inner.buffers()]))
    return max(distance(made[1][k], made[0][k]) for k in range(2))


def main() -> None:
    dist.init_process_group("gloo")
    report: dict[str, Any] = {name: contrast(name) for name in LOSSES}
    report["batchnorm"] = contrast("clip", norm=True)
    report["gathered"] = gathered_contrast()
    report["reductions"] = reductions()
    report["bf16"] = in_low_precision()
    report["refusals"] = refusals()
    report["networks"] = {name: network(make) for name, make in NETWORKS.items()}
    report["networks"]["resnet-50"] = network(partial(resnet50, width=16), side=64)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
