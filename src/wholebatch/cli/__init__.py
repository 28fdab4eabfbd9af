"""The command line: `wholebatch train`, `wholebatch recipes`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; say how to get what it is missing."""
    try:
        from wholebatch.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        from wholebatch.errors import MissingExtraError

        package = error.name.partition(".")[0]
        print(f"error: {MissingExtraError(package, 'cli', 'the command line')}", file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else list(arguments))
