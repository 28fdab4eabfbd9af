"""`python -m wholebatch.lint`: the linter without torch and without the command-line extra."""

from __future__ import annotations

import sys

from .command_line import main

if __name__ == "__main__":
    sys.exit(main())
