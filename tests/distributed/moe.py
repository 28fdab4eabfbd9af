"""The balance loss of a mixture of experts, over the global batch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer  # noqa: F401 (before the ranks are forked)
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.coupled.mixtures import InFloat64, mixture, texts, trained, undivided
from tests.support import Seen, distance


def by_window(kind: str, checkpointing: bool) -> float:
    """The error of the gradient of an uneven window on each rank; 9 samples of 13 on the first."""
    batch = texts(13)
    reference = undivided(mixture(kind), batch)[1]
    inner: Any = mixture(kind)
    if checkpointing:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorded = Seen(model, optimizer)
    own = slice(0, 9) if dist.get_rank() == 0 else slice(9, None)
    with InFloat64():
        train = wb.WholeBatch(model, optimizer, loss=wb.moe_loss(), micro_batch=2 + dist.get_rank())
        train.step({name: leaf[own] for name, leaf in batch.items()})
    return distance(recorded.gradients[0], reference)


def by_trainer(kind: type[Any]) -> float:
    """The error of a trainer's first update; transformers 48690 is about its own."""
    batch = texts(8)
    reference = undivided(mixture("Qwen3Moe"), batch)[1]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        update = trained(kind, mixture("Qwen3Moe"), batch, folder, **sizes)
    return distance(update, reference)


def report() -> dict[str, float]:
    from transformers import Trainer

    from wholebatch.integrations.transformers import exact

    return {
        "Mixtral": by_window("Mixtral", True),
        "Qwen2Moe": by_window("Qwen2Moe", False),
        "exact(Trainer)": by_trainer(exact(Trainer, loss=wb.moe_loss())),
        "Trainer": by_trainer(Trainer),
    }
