"""A recipe as a task to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.cli.run_settings import Config
    from wholebatch.tune import Task


def full_batches(
    recipe: Recipe, config: Config, *, rank: int = 0, ranks: int = 1
) -> tuple[Config, Callable[[], Any]]:
    """Return the settings as the data has them, and a function that returns the next full batch.

    Of several ranks this one's share; epoch after epoch.
    """
    from wholebatch.cli.training_run import fitted_to

    batches = recipe.build_batches(config.batch_size, seed=config.seed, rank=rank, ranks=ranks)
    config = fitted_to(config, batches)
    whole = None if batches.length is None else batches.length // config.batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch says nothing about the others
        return batches.take()

    return config, take


def made(
    recipe: Recipe, config: Config, where: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the recipe's model on its device and its optimizer, the same every time."""
    import torch

    from wholebatch.cli.recipes.recipe_batches import seed_generators

    seed_generators(config.seed)
    model = recipe.build_model()
    model.to(where, torch.bfloat16 if config.precision == "bf16-pure" else None)
    return model, recipe.build_optimizer(model, lr=config.lr)


def task_of(
    recipe: Recipe, config: Config, where: torch.device, *, micro_batch: int | None = None
) -> Task:
    """Return the recipe's model, loss and full batches as a task; on several ranks under DDP."""
    import torch

    from wholebatch.distributed.process_group import world_size
    from wholebatch.tune import Task

    ranks, ddp = world_size(), torch.nn.parallel.DistributedDataParallel
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    config, take = full_batches(recipe, config, rank=rank, ranks=ranks)

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = made(recipe, config, where)
        return ddp(model) if ranks > 1 else model, optimizer

    def loss(model: Any, micro: Any) -> Any:
        # The recipe's own module, not DDP around it: the window reduces the gradients itself.
        return recipe.loss(model.module if isinstance(model, ddp) else model, micro)

    options: dict[str, Any] = {"units": recipe.units, "clip_norm": config.clip_norm}
    if micro_batch is not None:
        options |= {"micro_batch": micro_batch, "precision": config.autocast}
    return Task(build, recipe.loss if ranks == 1 else loss, take, options)
