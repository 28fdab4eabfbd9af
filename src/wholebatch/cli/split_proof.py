"""`wholebatch verify --splits`: a function of a file, its samples cut in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wholebatch.errors import OptionError, RecipeError


def numbers(value: Any, label: str) -> tuple[int, ...]:
    """Return positive numbers, which were given as `8,4,1`."""
    words = [word.strip() for word in str(value).split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"{label} {value}: must be positive numbers, such as 8,4,1")
    return tuple(map(int, words))


@dataclass(frozen=True)
class FunctionOfFile:
    """A function of a Python file; other processes find it there too."""

    path: Path
    name: str

    def __call__(self, micro_batch: int) -> Any:
        return _loaded(self.path, self.name)(micro_batch)


_functions: dict[tuple[Path, str], Callable[[int], Any]] = {}


def _loaded(path: Path, name: str) -> Callable[[int], Any]:
    """Return a function of a file, which each process runs once."""
    if (path, name) not in _functions:
        from wholebatch.cli.recipes.recipe import run_file

        function = getattr(run_file(path), name, None)
        if not callable(function):
            raise RecipeError(f"{path} has no function {name}(micro_batch)")
        _functions[path, name] = function
    return _functions[path, name]


def prove_splits(
    path: Path, name: str, splits: tuple[int, ...], ranks: tuple[int, ...], *, as_json: bool
) -> int:
    """Print whether the function's update depends on the split; return the exit status."""
    from wholebatch.split_invariance import split_invariance

    train = FunctionOfFile(path, name)
    _loaded(path, name)  # a file that cannot be run is said before other processes start
    report = split_invariance(train, micro_batches=splits, ranks=ranks)
    print(report.to_json() if as_json else report)
    return 0 if report.same else 1
