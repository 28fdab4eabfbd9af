"""The exceptions of wholebatch.

```
WholebatchError
├── OptionError        (ValueError)       an option that is impossible, refused at construction
├── UnsupportedError   (TypeError)        a model, optimizer or device that breaks the promise
├── LossError          (ValueError)       a loss function's result is not a sum with its units
├── SplitError         (ValueError)       a batch that cannot be split, or a sample over the budget
├── WindowError        (RuntimeError)     a call that does not fit the state of the window
│   └── EmptyWindowError                  every unit of the window has weight zero
├── NonFiniteError     (ArithmeticError)  a gradient or loss is inf or nan; nothing was updated
├── StateError         (ValueError)       a state or checkpoint that does not belong here
├── RankError          (RuntimeError)     another rank failed, or the ranks do not fit together
├── RecipeError        (ValueError)       a training recipe that cannot be used
└── MissingExtraError  (ImportError)      an optional dependency is not installed
```

Each is also a subclass of a built-in exception, so `except ValueError` works.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "EmptyWindowError",
    "LossError",
    "MissingExtraError",
    "NonFiniteError",
    "OptionError",
    "RankError",
    "RecipeError",
    "SplitError",
    "StateError",
    "UnsupportedError",
    "WholebatchError",
    "WindowError",
]


def __dir__() -> list[str]:
    return [*__all__]


class WholebatchError(Exception):
    """The root: catch it to catch everything that wholebatch raises on purpose."""


class OptionError(WholebatchError, ValueError):
    """An option, or a combination of options, that is not possible."""


class UnsupportedError(WholebatchError, TypeError):
    """A model, optimizer, scheduler or device for which the promise cannot be kept."""


class LossError(WholebatchError, ValueError):
    """A loss function returned something other than a sum with its units."""


class SplitError(WholebatchError, ValueError):
    """A batch that cannot be split into micro-batches as asked."""


class WindowError(WholebatchError, RuntimeError):
    """A call that does not fit the state the window is in."""


class EmptyWindowError(WindowError):
    """All units of the window have weight zero, so its mean does not exist."""


class NonFiniteError(WholebatchError, ArithmeticError):
    """A loss or gradient is inf or nan. Parameters and optimizer state are untouched.

    `micro_batch` is the index of the first micro-batch that is to blame, where it is known.
    """

    def __init__(self, message: str, *, micro_batch: int | None = None) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch


class StateError(WholebatchError, ValueError):
    """A state dict or checkpoint that does not belong to this object, or is damaged."""


class RankError(WholebatchError, RuntimeError):
    """Another rank failed, with its message; or the ranks do not fit together."""


class RecipeError(WholebatchError, ValueError):
    """A recipe that is missing a part or whose parts do not fit together."""


class MissingExtraError(WholebatchError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'wholebatch[{extra}]'")
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made from: `args` holds the message."""
        return type(self), (self.package, self.extra, self.purpose), vars(self)
