"""Recipes for `wholebatch train`: a Python file, or one of those embedded here."""

from wholebatch.cli.recipes.recipe import (
    EMBEDDED,
    Recipe,
    RecipeDefaults,
    load_recipe,
    place_of,
    run_file,
    source_of,
)
from wholebatch.cli.recipes.recipe_batches import Batches, Nothing, Position

__all__ = [
    "EMBEDDED",
    "Batches",
    "Nothing",
    "Position",
    "Recipe",
    "RecipeDefaults",
    "load_recipe",
    "place_of",
    "run_file",
    "source_of",
]
