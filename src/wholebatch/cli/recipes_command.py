"""`wholebatch recipes`: what is embedded, and its source to begin one's own from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["recipes"]

_WIDE = 60  # columns that the table needs


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Print the source of this one.", show_default=False),
    ] = None,
) -> None:
    """List the embedded recipes, or print one: [bold]wholebatch recipes bytes-gpt > mine.py[/]."""
    from wholebatch.cli.recipes import EMBEDDED, load_recipe, source_of
    from wholebatch.errors import RecipeError

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
