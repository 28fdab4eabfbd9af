"""The known mistakes, one row of mistakes.md each, and what a verdict finds of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """A known mistake: its name, what it does, and what to do instead."""

    name: str
    does: str
    instead: str


def _mistakes() -> dict[str, Mistake]:
    """Read the table in mistakes.md, below its head."""
    lines = Path(__file__).with_name("mistakes.md").read_text(encoding="utf-8").splitlines()[4:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {key: Mistake(*texts) for key, *texts in rows}


MISTAKES = _mistakes()


@dataclass(frozen=True)
class Finding:
    """A mistake that explains a difference: its key in `MISTAKES`, how it shows, and where."""

    key: str
    variant: str
    where: tuple[str, ...] = ()
    """The modules or parameters that it is in."""
    is_beside: bool = False
    """True if it goes wrong beside the weights, which may be wrong as well."""
    advice: str = ""
    """What to do here, if that is more special than what `MISTAKES` says."""

    def of_loss(self, loss: str) -> Finding:
        """Return the finding, of one loss among several."""
        return replace(self, variant=f"{self.variant} (the loss of {loss})")

    @property
    def name(self) -> str:
        return MISTAKES[self.key].name

    @property
    def instead(self) -> str:
        return self.advice or MISTAKES[self.key].instead

    @property
    def place(self) -> str:
        """Return its name, and the modules or parameters that it is in."""
        return self.name + (f" in {listed(self.where)}" if self.where else "")


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the first four names, and how many more there are."""
    shown = ", ".join(name or "the model itself" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def micro_batches(count: int, kind: str = "") -> str:
    """Return `1 micro-batch`, or `3 uneven micro-batches`."""
    return f"{count} {kind}micro-batch{'' if count == 1 else 'es'}"


STEPPED_TWICE = Finding("two-owners", "two optimizers step on the same gradients")
