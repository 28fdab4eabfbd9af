"""Full batches of a recipe, one after the other: what commands measure with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholebatch.cli.options import Config
    from wholebatch.recipes import Recipe

__all__ = ["full_batches"]


def full_batches(
    recipe: Recipe, config: Config, *, rank: int = 0, ranks: int = 1
) -> tuple[Config, Callable[[], Any]]:
    """The settings as the data has them, and a function that gives the next full batch.

    Of several ranks this one's share; epoch after epoch.
    """
    from wholebatch.cli.session import fitted_to
    from wholebatch.recipes import Batches

    batches = Batches(
        recipe.build_data,
        batch_size=config.batch_size,
        seed=config.seed,
        collate=recipe.collate,
        rank=rank,
        ranks=ranks,
    )
    config = fitted_to(config, batches)
    whole = None if batches.length is None else batches.length // config.batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch says nothing about the others
        return batches.take()

    return config, take
