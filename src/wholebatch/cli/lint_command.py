"""`wholebatch lint`: mistakes of gradient accumulation in scripts and notebooks."""

from __future__ import annotations

from collections.abc import Sequence


def lint(arguments: Sequence[str]) -> int:
    """Find gradient accumulation mistakes in scripts and notebooks.

    The linter parses its own options: `python -m wholebatch.lint` runs without this package's
    other requirements.
    """
    from wholebatch.lint.command_line import main

    return main(list(arguments))
