"""Which rows are measured, in which order, and what each is expected to take.

The order is that of importance: whatever time there is, it goes to what matters most. Seconds and
GiB are those of earlier runs on an H200, a little rounded up; they decide what may be prepared
beside what, and whether a row is still begun.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAIN", "PEERS", "SIZES", "WHOLE", "Expected", "Spec", "expected"]

Spec = tuple[str, str, int]
"""Model, mode, micro-batch size (0: the whole batch)."""

WHOLE = "whole batch, compiled"
OURS = "wholebatch graph"
PEERS = ["loop", "HF Trainer", "Lightning", "Accelerate"]
SIZES = {
    "gpt-124m": [1, 4, 8],
    "gpt-1.3b": [1, 4],
    "resnet-50": [8, 32],
    "encoder": [4, 16],
    "gpt-cpu": [1, 4],
}

MAIN: list[Spec] = [
    *(("gpt-124m", OURS, size) for size in (4, 8, 1)),
    ("gpt-124m", WHOLE, 0),
    *(("gpt-1.3b", OURS, size) for size in (4, 1)),
    *(("resnet-50", OURS, size) for size in (32, 8)),
    ("gpt-1.3b", WHOLE, 0),
    *(("encoder", OURS, size) for size in (16, 4)),
    *(("gpt-124m", mode, size) for size in (4, 1) for mode in PEERS),
    ("gpt-124m", "loop + torch.compile", 4),
    *(("gpt-1.3b", mode, size) for size in (4, 1) for mode in PEERS),
    *(("resnet-50", mode, size) for size in (32, 8) for mode in PEERS),
    *(("encoder", mode, size) for size in (16, 4) for mode in PEERS),
    ("gpt-1.3b", "loop + torch.compile", 4),
    ("resnet-50", "loop + torch.compile", 32),
    ("encoder", "loop + torch.compile", 16),
]

_GIB = {"gpt-124m": 9.0, "gpt-1.3b": 38.0, "resnet-50": 8.0, "encoder": 15.0}
_GIB_OF_THE_WHOLE = {"gpt-124m": 62.0, "gpt-1.3b": 95.0}
_COMPILING = {"gpt-124m": 45.0, "gpt-1.3b": 80.0, "resnet-50": 75.0, "encoder": 110.0}


@dataclass(frozen=True)
class Expected:
    """What a row takes by itself: seconds from its start to its end, and GiB of the device."""

    seconds: float
    gib: float


def expected(spec: Spec, timed: float) -> Expected:
    """`timed`: the seconds of timed windows that were asked for."""
    model, mode, micro = spec
    gib = (_GIB_OF_THE_WHOLE if mode == WHOLE else _GIB).get(model, 0.0)
    if model not in _GIB:
        return Expected(20.0 + timed, 0.0)
    compiles = mode == WHOLE or "compile" in mode or "graph" in mode
    seconds = 12.0 + timed + (_COMPILING[model] if compiles else 10.0)
    return Expected(seconds + (12.0 if micro == 1 and not compiles else 0.0), gib)
