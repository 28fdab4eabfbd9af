"""The state of every random generator that a training step may draw from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from wholebatch.errors import StateError

__all__ = ["capture", "is_same", "restore"]


def capture(*, every: bool = True, to_save: bool = True) -> dict[str, Any]:
    """Return the generators' states; `every=False` leaves out Python's and NumPy's (cheaper).

    `to_save=False` is for states that stay in this process.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if every:
        state["python"] = random.getstate()
        numpy = sys.modules.get("numpy")  # only if the program uses it already
        if numpy is not None:
            name, keys, *rest = numpy.random.get_state()
            if to_save:  # not as uint32: torch.save takes that dtype, plain pickle does not
                keys = torch.from_numpy(keys.astype("int64"))
            state["numpy"] = (name, keys, *rest)
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to where `capture` found it."""
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        here = torch.cuda.device_count()
        if here != len(state["cuda"]):
            raise StateError(
                f"random state of {len(state['cuda'])} CUDA devices, and {here} are here: "
                "resume on the same number of visible devices"
            )
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        if isinstance(keys, torch.Tensor):
            keys = keys.cpu().numpy().astype("uint32")
        numpy.random.set_state((name, keys, position, has_gauss, cached))


def is_same(a: Any, b: Any) -> bool:
    """Return True if two captured states are equal: nothing was drawn between them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a, "tobytes"):  # NumPy's keys
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return bool(a == b)
