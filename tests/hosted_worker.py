"""Run under torchrun: a host that shards its model by FSDP2, and one that replicates it by DDP."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support import Whole, distance, mean, mlp, pieces, samples
from wholebatch.hosted import Hosted, gradient_holders

SIZES = {0: [4, 1, 3], 1: [2, 4, 2]}


def saved_and_loaded(window: Hosted, hosted: nn.Module) -> Hosted:
    """The open window in another one, from what the first rank would write to a file."""
    parameters = list(hosted.parameters())
    saved = [window.state_dict(parameters)]
    dist.broadcast_object_list(saved, src=0)
    hosted.zero_grad()
    again = Hosted([hosted], device=torch.device("cpu"))
    again.load_state_dict(saved[0], parameters)
    return again


def error(kind: str) -> float:
    """Relative error of one update by a host of this kind, clipped by norm."""
    rank, model = dist.get_rank(), mlp()
    if kind == "fsdp2":
        hosted: nn.Module = fully_shard(model)
    else:
        hosted = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.1)
    window = Hosted([hosted], device=torch.device("cpu"))
    own = pieces(samples(16), [8, 8])[rank]
    for place, micro in enumerate(pieces(own, SIZES[rank])):
        last = place == 2
        if kind == "fsdp2":
            hosted.set_requires_gradient_sync(last)  # type: ignore[operator]
        else:
            hosted.require_backward_grad_sync = last
        loss = mean(hosted, micro)
        window.weigh(loss, units=len(micro["y"]))
        loss.backward()
        if kind == "ddp resumed" and place == 1:
            window = saved_and_loaded(window, hosted)
    window.settle(gradient_holders([hosted], [optimizer]), averaged_by=window.ranks.size)
    nn.utils.clip_grad_norm_(hosted.parameters(), 0.05)
    optimizer.step()
    whole = Whole(mlp(), clip_norm=0.05)
    whole.step(samples(16))
    trained = [
        (p.full_tensor() if kind == "fsdp2" else p).detach() - before.detach()
        for p, before in zip(hosted.parameters(), whole.start.parameters(), strict=True)
    ]
    return distance(trained, whole.updates())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {kind: error(kind) for kind in ("ddp", "ddp resumed", "fsdp2")}
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()
