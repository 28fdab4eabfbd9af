"""What a verdict answers, in a word; and a place where trainers are quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from wholebatch.verification import LoopVerdict


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what trainers say while they are set up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def found_in(verdict: LoopVerdict) -> str:
    """Return the key of what was found first."""
    if verdict.same:
        return "right"
    return "not judged" if not verdict.judged else (*verdict.mistakes, "unknown")[0]
