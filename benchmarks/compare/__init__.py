"""What `make compare` compares: wholebatch in a library beside the library's own accumulation.

One module per library in this package, each with one function:

    def rows() -> list[Row]: ...

A row is one case in one precision. Both errors are relative L2 distances of what was trained (the
updates of all windows together: final parameters minus initial ones) to the same library's own
training on undivided batches, with plain SGD, so that a wrong gradient cannot hide.
`benchmarks/comparison.py` starts every module that `LIBRARIES` names in a process of its own, with
the environment given there, and writes docs/comparison.md and docs/benchmarks/comparison.json. It
fails if wholebatch is above `LIMITS` in any row.

A module imports its library itself, at the top. `own=None` says that the library has no
accumulation of its own for the case; `note` says in a few words what else a reader must know.
"""

from compare.row import CASES, LIBRARIES, LIMITS, Row

__all__ = ["CASES", "LIBRARIES", "LIMITS", "Row"]
