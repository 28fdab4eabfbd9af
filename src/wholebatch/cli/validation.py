"""The mean loss over a recipe's held-out data, while a run goes on as if nobody had looked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholebatch.cli.recipes import Nothing
from wholebatch.cli.training_engines import Zero
from wholebatch.cli.training_run import Session
from wholebatch.core import precision
from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.splitting import split, to_device
from wholebatch.errors import UnsupportedError


def check_validation(session: Session) -> None:
    """Refuse `--validate` where there is nothing to evaluate, or nobody to do it."""
    every = session.config.validate
    if every is not None and not session.recipe.has_validation:
        raise UnsupportedError(
            f"--validate {every}: {session.recipe.path} has no validation(), which returns the "
            "held-out samples as data() does its own"
        )
    if every is not None and session.world.parallel == "pipeline":
        raise UnsupportedError(
            f"--validate {every} with --parallel pipeline: no rank has the whole model; use ddp, "
            "fsdp2 or deepspeed"
        )


def is_due(session: Session) -> bool:
    """True after every `--validate` updates, and after the last one."""
    every, updates = session.config.validate, session.train.updates
    if not session.recipe.has_validation or session.world.parallel == "pipeline":
        return False
    return updates == session.config.steps or (every is not None and updates % every == 0)


def evaluate(session: Session) -> float:
    """Return the mean loss over the units of all held-out samples, over all ranks.

    The model is in evaluation mode. Its mode and all random numbers are as before afterwards.
    """
    recipe, config, world = session.recipe, session.config, session.world
    batches = recipe.build_batches(
        config.batch_size, seed=0, rank=world.share, ranks=world.shares, held_out=True
    )
    given = session.engine.engine if isinstance(session.engine, Zero) else session.model
    size = session.train.micro_batch_size or config.batch_size
    casts = precision.choose(config.autocast, world.device.type, keeps=False)
    sums: dict[str, tuple[float, float]] = {}
    weights: dict[str, float] = {}
    with torch.random.fork_rng(), _evaluating(given), torch.no_grad():
        while (batch := batches.peek()) is not None and batches.position.epoch == 0:
            is_empty = isinstance(batch, Nothing)
            # A rank without samples runs too: sharded models gather in their forwards.
            for micro in split(batch.like if is_empty else batch, size):
                with casts.forward():
                    found = as_loss(recipe.loss(given, to_device(micro, world.device)))
                for name, part in _parts(found).items():
                    weights[name] = float(getattr(part, "weight", 1.0))
                    total, units = sums.get(name, (0.0, 0.0))
                    if not is_empty:
                        total, units = total + float(part.total), units + float(part.units)
                    sums[name] = total, units
            batches.take()
    everyones = world.gathered(sums)
    return sum(
        weight * sum(of[name][0] for of in everyones) / sum(of[name][1] for of in everyones)
        for name, weight in weights.items()
    )


def _parts(found: Any) -> dict[str, Any]:
    return {"": found} if isinstance(found, Loss) else dict(found.by_name)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and back into the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was
