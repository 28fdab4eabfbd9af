"""What `benchmarks/split_dependence.py` measures: public trainers, each with its own accumulation.

One module per library in this package, each with one function:

    def rows() -> list[Row]: ...

A row is one case of one trainer. Both errors are relative L2 distances of what was trained (the
updates of all windows together: final parameters minus initial ones) to the same trainer's own
training on undivided batches, with plain SGD, so that a wrong gradient cannot hide.

A module imports its library itself, at the top. `own=None` says that the library has no
accumulation of its own for the case, `ours=None` that wholebatch has no adapter for it.
"""

from compare.row import ABOUT, CASES, LIBRARIES, LIMITS, About, Row

__all__ = ["ABOUT", "CASES", "LIBRARIES", "LIMITS", "About", "Row"]
