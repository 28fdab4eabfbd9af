"""The loops: each makes one update per `next()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholebatch.core.options import grouped
from wholebatch.core.splitting import to_device
from wholebatch.core.whole_batch import WholeBatch
from wholebatch.tune.loop_comparison import other_libraries as frameworks
from wholebatch.tune.loop_comparison.training_job import Job

__all__ = ["WAYS", "Way"]

Made = tuple[nn.Module, torch.optim.Optimizer]
Loop = Callable[[Job, nn.Module, torch.optim.Optimizer], Iterator[None]]


@dataclass(frozen=True)
class Way:
    """One way to make the update: its name and its loop."""

    name: str
    loop: Loop
    package: str | None = None
    """The package that it needs."""


def _ours(execute: str) -> Loop:
    def loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        def loss(model: Any, micro: Any) -> Any:
            job.meet()
            return job.loss(model, micro)

        train = WholeBatch(
            model,
            optimizer,
            loss=loss,
            precision=job.precision,
            execute=execute,  # type: ignore[arg-type]
            clip_norm=job.clip_norm,
            **grouped({**job.options, "micro_batch": job.micro_batch, "nonfinite": "skip"}),
        )
        for batch in train.over(job.micro_batches(whole=True), ahead=True):
            train.step(batch)
            job.is_compiled = train._runner.executor.mode != "eager"
            yield

    return loop


def _by_hand(*, compiled: bool = False, whole: bool = False) -> Loop:
    def loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        called: Any = torch.compile(model) if compiled else model
        job.is_compiled = compiled
        scaler = torch.amp.GradScaler(job.device.type, enabled=job.precision == "fp16")
        steps = 1 if whole else job.steps
        for at, host in enumerate(job.micro_batches(whole=whole), start=1):
            micro = to_device(host, job.device)
            with job.autocast():
                loss = job.mean(called, micro) / steps
            scaler.scale(loss).backward()
            if at % steps == 0:
                if job.clip_norm is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                yield

    return loop


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("wholebatch", _ours("auto")),
        Way("wholebatch eager", _ours("eager")),
        Way("loop", _by_hand()),
        Way("loop + torch.compile", _by_hand(compiled=True)),
        Way("whole batch", _by_hand(whole=True)),
        Way("whole batch + torch.compile", _by_hand(whole=True, compiled=True)),
        Way("Accelerate", frameworks.accelerate, "accelerate"),
        Way("Fabric", frameworks.fabric, "lightning"),
        Way("Lightning", frameworks.lightning, "lightning"),
        Way("Transformers", frameworks.transformers, "transformers"),
    )
}
"""All ways by name, in the order in which they are shown."""
