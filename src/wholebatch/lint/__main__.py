"""`python -m wholebatch.lint`: the linter without torch and without the command-line extra."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    # The command line is above this package, so it is looked up by its name.
    sys.exit(import_module("wholebatch.cli").main(["lint", *sys.argv[1:]]))
