"""The recipe's model, optimizer and loss put to work by the engine that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholebatch import WholeBatch
from wholebatch.cli.deepspeed_run import Zero
from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.pipeline_run import Staged, stage_parts
from wholebatch.cli.recipes import Recipe
from wholebatch.cli.run_settings import Config
from wholebatch.core.options import Close, Memory
from wholebatch.errors import OptionError, RecipeError

__all__ = ["Trained", "micro_batch_of", "move", "train_with"]


@dataclass(frozen=True)
class Trained:
    """What makes the updates, and who keeps its state where the model cannot be asked."""

    optimizer: torch.optim.Optimizer
    train: WholeBatch | Staged
    engine: Zero | Staged | None


def train_with(recipe: Recipe, config: Config, crew: Crew, model: nn.Module) -> Trained:
    """Whole on one process, or spread over the ranks as `crew.parallel` says."""
    if crew.parallel == "pipeline":
        if config.gradients != "device":
            raise OptionError(
                f"--gradients {config.gradients} with --parallel pipeline: its stages keep their "
                "gradients; leave it out, or use --parallel ddp"
            )
        parts = stage_parts(recipe, config, crew, model)
        optimizer = recipe.build_optimizer(parts, lr=config.lr)
        staged = Staged(recipe, config, crew, model, parts, optimizer)
        return Trained(optimizer, staged, staged)
    zero = None
    given: nn.Module
    if crew.parallel == "deepspeed":
        optimizer = recipe.build_optimizer(model, lr=config.lr)
        zero = Zero(model, optimizer, config, crew)
        spread, stepped = zero.engine, zero.engine.optimizer
        given = spread  # graphs and gathered parameters are the engine's
    else:
        spread = crew.spread(model)
        optimizer = stepped = recipe.build_optimizer(model, lr=config.lr)
        given = model  # not DDP around it: the window reduces the gradients itself

    def loss(called: nn.Module, micro: Any) -> Any:
        return recipe.loss(given if called is spread else called, micro)

    train = WholeBatch(
        spread,
        stepped,
        loss=loss,
        units=recipe.units,
        audit=recipe.audit,
        micro_batch=micro_batch_of(recipe, config),
        precision=config.autocast,
        clip_norm=config.clip_norm,
        memory=Memory(config.budget, gradients=config.gradients),  # type: ignore[arg-type]
        execute=config.execute,  # type: ignore[arg-type]
        close=Close(nonfinite="skip" if config.gradients == "release" else "raise"),
        scheduler=recipe.build_scheduler(optimizer, steps=config.horizon),
    )
    if config.noise != "off":
        train.measure_noise(config.noise)  # type: ignore[arg-type]
    return Trained(optimizer, train, zero)


def move(model: nn.Module, config: Config, crew: Crew) -> None:
    """The model in its precision and on its device; a pipeline moves only its stages."""
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    if crew.parallel == "pipeline":
        return
    try:
        model.to(crew.device)
    except (RuntimeError, NotImplementedError) as error:
        raise RecipeError(
            f"the recipe's model cannot be moved to {crew.device}: {error}"
        ) from error


def micro_batch_of(recipe: Recipe, config: Config) -> Any:
    """How a batch is split: a number of samples, a budget of tokens, or "auto"."""
    return config.micro_batch if config.tokens is None else recipe.build_tokens(config.tokens)
