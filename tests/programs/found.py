"""Programs that failed once: right ones that were wrong or refused, mistakes that nobody named."""

from __future__ import annotations

from tests.programs.description import Micro, Program

ONE = (Micro(1),)
FOUND = (
    # The limit of a clip by value was rounded to float32.
    Program(windows=(ONE, ONE), loss="terms", way="announce", loop="last", clip="value"),
    # A mean over one label was taken for a mean that is given as a sum.
    Program(
        windows=((Micro(3, "one"), *ONE, *ONE, *ONE),),
        loss="terms",
        given="mean",
        way="announce",
        loop="last",
    ),
    # Micro-batches of one sample: no test of the loss looked for a division by the steps.
    Program(windows=((*ONE, *ONE),), way="run", mistake="divided by steps"),
)
