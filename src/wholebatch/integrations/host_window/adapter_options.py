"""What every adapter over torch lets its user choose, with the same words."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.core.close import Policy
from wholebatch.errors import OptionError

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """How a host's windows are kept; impossible values are refused here, at construction."""

    batchnorm: str = "refuse"
    zero_units: Policy = "raise"
    nonfinite: Policy = "raise"
    audit: bool = True

    def __post_init__(self) -> None:
        for name in ("zero_units", "nonfinite"):
            if getattr(self, name) not in ("raise", "skip"):
                raise OptionError(f"{name}={getattr(self, name)!r}: must be 'raise' or 'skip'")
        if self.batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact" in the loop of another library: exact BatchNorm runs the '
                "forwards of a window in lock-step, and they are not ours; use wb.WholeBatch, or "
                "name another policy"
            )
