"""The memory of a rank under DeepSpeed's ZeRO stages, and with state kept in host memory.

ZeRO 1 and 2 keep whole parameters on every rank; ZeRO 3 shards them, and runs here as FSDP2's
`fully_shard` does. In all stages the optimizer steps one flat slice of float32 per group, a copy of
this rank's part of the parameters. Sizes are those of DeepSpeed 0.19 with its defaults.
"""

from __future__ import annotations

import torch
from torch import nn

from wholebatch.memory.fsdp_sharding import Sharding

BUCKET = 500_000_000
"""The elements of DeepSpeed's buffer for gradients to reduce (`reduce_bucket_size`)."""
LIVE = 1_000_000_000
"""The elements of gathered parameters that ZeRO 3 keeps for later use (`max_reuse_distance`)."""
AHEAD = 50_000_000
"""The elements that ZeRO 3 gathers in one go (`prefetch_bucket_size`), and copies out of there."""

FLATTEN = "flatten"
"""The part of a window in which whole gradients become slices, after the last backward."""

ByCategory = dict[str, int]


class FlatSlices:
    """An optimizer over flat slices of its parameters, as ZeRO makes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding) -> None:
        self.optimizer = optimizer
        self._frees_gradients = sharding.zero < 3
        self.slices = []
        for group in optimizer.param_groups:
            count = -(-sum(p.numel() for p in group["params"]) // sharding.ranks)
            on = group["params"][0].device if group["params"] else "cpu"
            group["params"] = [nn.Parameter(torch.empty(count, device=on))]
            self.slices += group["params"]
        optimizer.state.clear()

    def step(self, model: nn.Module) -> None:
        """Step the slices; whole gradients have been added into theirs before."""
        for one in self.slices:
            one.grad = torch.empty_like(one, requires_grad=False)
        if self._frees_gradients:
            model.zero_grad(set_to_none=True)
        self.optimizer.step()
        for one in self.slices:
            one.grad = None


def on_one_rank(
    parts: dict[str, ByCategory], sharding: Sharding, elements: int, size: int
) -> dict[str, ByCategory]:
    """Return the peaks corrected for DeepSpeed's own buffers and for state in host memory.

    The model has `elements` parameters of `size` bytes each.
    """
    shard, slices = size * elements // sharding.ranks, 4 * elements // sharding.ranks
    found = {}
    for name, before in parts.items():
        part, is_step = dict(before), name == "step"
        if sharding.zero == 3 and name not in ("step", FLATTEN):
            gathered, ahead = (size * min(elements, most) for most in (LIVE, AHEAD))
            part["parameters"] = max(part["parameters"], shard + slices + gathered)
            # The end of the forward has no temporaries of the backward yet, but this buffer.
            part["communication"] += max(0, ahead - part["temporaries"])
        if sharding.zero and not is_step and name != FLATTEN:
            part["communication"] += size * BUCKET
        elif sharding.zero in (1, 2) and name == FLATTEN:
            part["gradients"] += slices
        if sharding.zero == 2 and not is_step:
            part["gradients"] += slices
        if sharding.offload:
            if is_step:
                continue  # It runs on the host.
            part["optimizer state"] = 0
            part["parameters"] -= slices if sharding.zero else 0
            part["parameters"] -= shard if sharding.shards_parameters else 0
            if sharding.zero >= 2 or (sharding.zero == 0 and sharding.sync == "every"):
                part["gradients"] = max(0, part["gradients"] - slices)
        found[name] = part
    return found


def host_bytes(sharding: Sharding, elements: int, size: int) -> int:
    """Return the bytes that all ranks together keep in host memory with offload, with Adam."""
    if not sharding.offload:
        return 0
    shards = size if sharding.shards_parameters else 0
    return elements * (shards + 4 * (4 if sharding.zero else 3))
