"""The mean loss over a recipe's held-out data, while a run goes on as if nobody had looked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from wholebatch.batch import split, to_device
from wholebatch.cli.recipes.recipe import Recipe
from wholebatch.cli.recipes.recipe_batches import Nothing
from wholebatch.cli.run_settings import Config
from wholebatch.cli.training_engines import Zero
from wholebatch.cli.training_run import Session
from wholebatch.coupled.normalisation_layers import evaluation_mode
from wholebatch.errors import UnsupportedError
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window import precision


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
    config, world = session.config, session.world
    given = session.engine.engine if isinstance(session.engine, Zero) else session.model
    size = session.train.micro_batch_size or config.batch_size
    share = (world.share, world.shares)
    sums = held_out_sums(session.recipe, config, given, world.device, size=size, share=share)
    return mean_loss(world.gathered(sums))


Sums: TypeAlias = dict[str, tuple[float, float, float]]
"""By name of a term: its total, its units and its weight."""


def held_out_sums(
    recipe: Recipe,
    config: Config,
    model: nn.Module,
    device: torch.device,
    *,
    size: int,
    share: tuple[int, int] = (0, 1),
) -> Sums:
    """Return the sums over this rank's share of the held-out samples."""
    rank, ranks = share
    batches = recipe.build_batches(config.batch_size, seed=0, rank=rank, ranks=ranks, held_out=True)
    casts = precision.choose(config.autocast, device.type, keeps=False)
    sums: Sums = {}
    with torch.random.fork_rng(), evaluation_mode(model), torch.no_grad():
        while (batch := batches.peek()) is not None and batches.position.epoch == 0:
            is_empty = isinstance(batch, Nothing)
            # A rank without samples runs too: sharded models gather in their forwards.
            for micro in split(batch.like if is_empty else batch, size):
                with casts.forward():
                    found = as_loss(recipe.loss(model, to_device(micro, device)))
                for name, part in terms_of(found).items():
                    total, units, _ = sums.get(name, (0.0, 0.0, 1.0))
                    if not is_empty:
                        total, units = total + float(part.total), units + float(part.units)
                    sums[name] = total, units, part.weight
            batches.take()
    return sums


def mean_loss(everyones: Sequence[Sums]) -> float:
    """Return the mean over all ranks' units, of several terms their weighted sum."""
    return sum(
        weight * sum(of[name][0] for of in everyones) / sum(of[name][1] for of in everyones)
        for name, (_, _, weight) in everyones[0].items()
    )
