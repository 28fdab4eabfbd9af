"""DeepSpeed's ZeRO on two ranks: the update of one process on all of the data.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # the window counts, not the engine
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def main() -> float:
    dist.init_process_group("gloo")
    whole, sharded = network(), network()
    batch = {"x": torch.randn(20, 8), "y": torch.arange(20) % 3}
    start = parameters_to_vector(whole.parameters()).detach()

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=sharded, optimizer=optimizer, config=CONFIG)
    train = wb.WholeBatch(engine, engine.optimizer, loss=loss, micro_batch=4)
    mine = slice(0, 12) if dist.get_rank() == 0 else slice(12, 20)  # uneven shares
    train.step({name: value[mine] for name, value in batch.items()})

    undivided = torch.optim.SGD(whole.parameters(), lr=0.1)
    nn.functional.cross_entropy(whole(batch["x"]), batch["y"]).backward()
    undivided.step()
    right = parameters_to_vector(whole.parameters()).detach() - start
    moved = parameters_to_vector(sharded.parameters()).detach() - start
    off = float((moved - right).norm() / right.norm())
    if dist.get_rank() == 0:
        print(f"Shown: with ZeRO 2 on two ranks, the update in float32 is {off:.0e} off.")
    dist.destroy_process_group()
    return off


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = (
            "DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py"
        )
        sys.exit(f"run me with torchrun: {command}")
    main()
