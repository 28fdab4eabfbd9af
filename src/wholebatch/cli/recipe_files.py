"""Find the file of a recipe: the user's, or an embedded one. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from wholebatch.errors import RecipeError

EMBEDDED = {"bytes-gpt": "bytes_gpt.py", "digits-cnn": "digits_cnn.py"}
"""The embedded recipes by name, the default first."""


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, or say which names there are."""
    if name in EMBEDDED:
        return Path(__file__).parent / "recipes" / EMBEDDED[name]
    path = Path(name)
    if "\0" not in name and path.is_file():
        return path.resolve()
    raise RecipeError(
        f"recipe {name!r}: there is no such file; the embedded recipes are: {', '.join(EMBEDDED)}"
    )
