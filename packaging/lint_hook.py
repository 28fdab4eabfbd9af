#!/usr/bin/env python3
"""The pre-commit hook: runs the linter from this checkout, so that nothing has to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from wholebatch.cli import main

if __name__ == "__main__":
    sys.exit(main(["lint", *sys.argv[1:]]))
