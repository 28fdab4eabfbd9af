"""`wholebatch recipes`: the embedded recipes, and their source to begin one's own from."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from wholebatch.cli.command_options import argument, command

_WIDE = 60  # columns that the table needs


@dataclass(frozen=True)
class RecipesOptions:
    """The argument of `wholebatch recipes`."""

    name: str | None = argument(None, None, "Print the source of this one.")


@command(RecipesOptions)
def recipes(options: RecipesOptions) -> None:
    """List the embedded recipes, or print one: [bold]wholebatch recipes bytes-gpt > mine.py[/]."""
    from wholebatch.cli.recipes import EMBEDDED, load_recipe, source_of
    from wholebatch.errors import RecipeError

    name = options.name
    if name is not None:
        if name not in EMBEDDED:
            raise RecipeError(f"recipe {name!r} is not embedded; there are: {', '.join(EMBEDDED)}")
        print(source_of(name), end="")
        return
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("recipe", "what it trains", "batch", "micro-batch", "updates"):
        table.add_column(column, no_wrap=column != "what it trains")
    for one in EMBEDDED:
        recipe = load_recipe(one)
        defaults = recipe.defaults
        batch, micro, steps = (defaults[key] for key in ("batch_size", "micro_batch", "steps"))
        table.add_row(one, recipe.description, str(batch), str(micro), str(steps))
        if console.width < _WIDE:
            numbers = f"batch {batch}, micro-batch {micro}, {steps} updates"
            console.print(f"{one}: {recipe.description} ({numbers})", highlight=False, markup=False)
    if console.width >= _WIDE:
        console.print(table)
    console.print("Train one: wholebatch train bytes-gpt", highlight=False)
