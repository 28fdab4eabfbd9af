"""Sizes, distances and memory categories as a person reads them.

Here, below everything, because pages and the command line must not import torch to know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "buffers",
    "inputs",
    "communication",
)
"""What memory is for, in the order in which it is stacked in a chart."""


def bytes_said(number: float) -> str:
    """Return bytes as a person reads them.

    >>> bytes_said(900), bytes_said(3 * 2**29)
    ('900 bytes', '1.50 GiB')
    """
    for limit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.2f} {name}"
    return f"{number:.0f} bytes"


def short_count(number: float) -> str:
    """Return a number in short form.

    >>> short_count(812), short_count(12_345), short_count(4_560_000), short_count(7.3)
    ('812', '12.3k', '4.56M', '7.3')
    """
    for limit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{number / limit:#.3g}".rstrip(".") + name
    return f"{number:.3g}" if number < 10 else f"{number:.0f}"


def memory_said(peak: int | None, undivided: int | None) -> str:
    """Return the peak of a run in words, beside that predicted for the batch in one piece.

    >>> memory_said(2**20, 3 * 2**20)
    '1.00 MiB; undivided, the batch would need 3.00 MiB (3.0× as much)'
    """
    if peak is None:
        return "not measured (it is measured in one process, from the third window on)"
    if undivided is None:
        return f"{bytes_said(peak)} (for the undivided batch it cannot be predicted)"
    times = f"{undivided / peak:.1f}× as much"
    return f"{bytes_said(peak)}; undivided, the batch would need {bytes_said(undivided)} ({times})"


def percent(value: float) -> str:
    """Return a relative distance in words: percent, a power of ten, or a multiple.

    >>> percent(0.334), percent(2.04e-7), percent(0.0), percent(7.3), percent(731)
    ('33%', '2.0e-07', '0', '730%', '7.3e+02 times')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "infinitely far"
    if value >= 10:
        return f"{value:.2g} times"
    if value >= 0.095:
        return f"{float(f'{value:.2g}'):.0%}"
    return f"{value:.1e}" if value < 0.001 else f"{value:.2%}"


def precision_meant(precision: object, names: Iterable[str]) -> str:
    """Return which of our precisions another library's name means, in words; else nothing.

    >>> precision_meant("bf16-mixed", ["full", "bf16"]), precision_meant("int4", ["full"])
    (' (did you mean bf16?)', '')
    """
    text = str(precision).removeprefix("torch.").removesuffix("-mixed").removesuffix("-true")
    text = text.replace("bfloat", "bf").replace("float", "fp")
    name = {"16": "fp16", "half": "fp16", "32": "full", "fp32": "full"}.get(text, text)
    return f" (did you mean {name}?)" if name in names else ""
