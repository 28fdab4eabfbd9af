"""`wholebatch recipes`: list the embedded recipes, or print one as a start for your own."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.cli.command_options import argument, command, one_of
from wholebatch.cli.recipe_files import EMBEDDED, find_recipe
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    plain_table,
    say_command,
)


@dataclass(frozen=True)
class RecipesOptions:
    """The argument of `wholebatch recipes`."""

    name: str | None = argument(
        None, "NAME", "Print the source of this recipe.", check=one_of(*EMBEDDED)
    )


@command(RecipesOptions, "wholebatch recipes", "wholebatch recipes bytes-gpt > my_recipe.py")
def recipes(options: RecipesOptions) -> None:
    """List the embedded recipes, or print one to start your own from."""
    if options.name is not None:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return
    console = console_of()
    with Spinner(console_of(stderr=True)) as doing:
        doing("importing torch")
        from wholebatch.cli.recipes.recipe import load_recipe

    table = plain_table("recipe", "what it trains", ">batch", ">micro-batch", ">updates")
    for name in EMBEDDED:
        recipe = load_recipe(name)
        keys = ("batch_size", "micro_batch", "updates")
        numbers = (str(recipe.defaults.get(key, "auto")) for key in keys)
        table.add_row(name, recipe.description, *numbers)
    console.print(table, highlight=False)
    say_command(console, "Train one:", "wholebatch train bytes-gpt")
