"""The command line: `wholebatch train`, `wholebatch verify`, `wholebatch lint` and others."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; say how to get what it is missing."""
    from wholebatch.cli.app import run

    try:
        return run(sys.argv[1:] if arguments is None else list(arguments))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        from wholebatch.errors import MissingExtraError

        print(f"error: {MissingExtraError('rich', 'cli', 'the command line')}", file=sys.stderr)
        return 2
