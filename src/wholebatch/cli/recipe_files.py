"""Find the file of a recipe: the user's, or an embedded one. Imports no torch."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from wholebatch.errors import RecipeError

EMBEDDED = {"bytes-gpt": "bytes_gpt.py", "digits-cnn": "digits_cnn.py"}
"""The embedded recipes by name, the default first."""


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, or say which names there are."""
    if name in EMBEDDED:
        return Path(__file__).parent / "recipes" / EMBEDDED[name]
    path = Path(name)
    if path.is_file():
        return path.resolve()
    known = ", ".join(EMBEDDED)
    if not name.strip() or ("\0" not in name and os.path.lexists(name)):
        kind = "not a file" if name.strip() else "empty"
        kind = "a folder" if path.is_dir() and name.strip() else kind
        raise RecipeError(f"recipe {name!r} is {kind}; give a Python file or one of: {known}")
    meant = f"{name}.py" if Path(f"{name}.py").is_file() else ""
    meant = meant or next(iter(get_close_matches(name, EMBEDDED, n=1)), "")
    hint = f" (did you mean {meant}?)" if meant else ""
    raise RecipeError(
        f"recipe {name!r}: there is no such file{hint}; the embedded recipes are: {known}"
    )
