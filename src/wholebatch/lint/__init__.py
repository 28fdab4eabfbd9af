"""Linter for gradient accumulation mistakes in training scripts, which are never imported or run.

```python
from wholebatch.lint import lint_paths

for finding in lint_paths(["train.py"]):
    print(finding.place, finding.code, finding.message)
```

On the command line: `wholebatch lint PATH...`, or `python -m wholebatch.lint PATH...` without torch
and the command-line extra.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .check_files import Finding, check_source, lint_files
from .lint_settings import Settings
from .rules import RULES, Rule
from .source_files import Source, collect

__all__ = ["RULES", "Finding", "Rule", "Settings", "lint_paths", "lint_source"]


def lint_paths(paths: Iterable[str], *, settings: Settings | None = None) -> list[Finding]:
    """Return the findings of all scripts and notebooks under the paths."""
    chosen = settings if settings is not None else Settings()
    named = [str(Path(path)) for path in paths]
    return lint_files(collect(named, chosen), chosen, named=named)


def lint_source(
    text: str, *, path: str = "<source>", settings: Settings | None = None
) -> list[Finding]:
    """Return the findings of a script given as text."""
    return check_source(Source(path, text), settings if settings is not None else Settings())
