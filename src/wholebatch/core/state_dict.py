"""Saving and restoring: counters, generators, and a window that is half full.

What is saved here is what the library owns. The model's and the optimizer's own state is saved by
their own `state_dict`, as everywhere in torch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from wholebatch.core.close import read_scalars
from wholebatch.core.forward_state import capture_random, restore_random
from wholebatch.core.window import Window
from wholebatch.errors import StateError

_FORMAT = 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def progress(kind: str, window: Window) -> dict[str, Any]:
    """Return the state that Accumulator and WholeBatch both keep."""
    target = window.target
    return {
        "format": _FORMAT,
        "kind": kind,
        "updates": window.updates,
        "skipped": window.skipped,
        "next_seed": window.next_seed,
        "window": None if window.open is None else window_state(window),
        "scaler": None if target.scale is None else target.scale.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in target.schedulers],
        "ema": target.ema.state_dict() if isinstance(target.ema, nn.Module) else None,
        "random": capture_random(),
    }


def load_progress(kind: str, window: Window, state: dict[str, Any]) -> None:
    """Load `progress`; raise a StateError, with nothing changed, if it does not belong here."""
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is not a state dict of wholebatch (it has no 'format')")
    if state["format"] != _FORMAT:
        raise StateError(
            f"state dict of format {state['format']}, this version reads format {_FORMAT}: "
            "use the version of wholebatch that wrote it"
        )
    if state["kind"] != kind:
        raise StateError(f"state dict of {state['kind']}: cannot be loaded into {kind}")
    target = window.target
    if (state["scaler"] is None) != (target.scale is None):
        raise StateError(
            "loss scaling differs: the state was saved "
            f"{'without' if state['scaler'] is None else 'with'} a scaler; use the same precision"
        )
    if len(state["schedulers"]) != len(target.schedulers):
        raise StateError(
            f"the state holds {len(state['schedulers'])} schedulers, and {len(target.schedulers)} "
            "are here: pass the same ones"
        )
    check_window(window, state["window"])
    if window.open is not None:
        window.discard()

    window.updates = state["updates"]
    window.skipped = state["skipped"]
    window.next_seed = state["next_seed"]
    if target.scale is not None:
        target.scale.load_state_dict(state["scaler"])
    for scheduler, saved in zip(target.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if isinstance(target.ema, nn.Module) and state["ema"] is not None:
        target.ema.load_state_dict(state["ema"])
    load_window(window, state["window"])
    restore_random(state["random"])


def window_state(window: Window) -> dict[str, Any]:
    """Return the open window, with its gradients."""
    window.current.saved = True
    now = window.current
    if now.broken:
        raise StateError(
            "the last backward of this window failed half way: discard() it before saving"
        )
    if not window.sync.keeps_gradients:
        raise StateError(
            "a sharded model holds the gradients of an open window inside its engine: save "
            "between windows"
        )
    return {
        "micro_batches": now.micro_batches,
        "known": now.known,
        "seed": read_scalars([now.seed])[0],
        "totals": {name: read_scalars(totals) for name, totals in now.totals.items()},
        "units": {name: read_scalars(units) for name, units in now.units.items()},
        "weights": dict(now.weights),
        "owners": list(now.owners),
        "loss_scale": now.loss_scale,
        "seconds": time.perf_counter() - now.started,
        "gradients": window.store.saved(),
        "parameters": _checksums(window),
    }


def _checksums(window: Window) -> list[int]:
    """Return a number for each parameter that changes with its bits, the same on every device."""
    found = []
    for parameter in (p for model in window.target.models for p in model.parameters()):
        bits = getattr(parameter, "to_local", lambda one=parameter: one)().detach()
        try:
            bits = torch.view_as_real(bits) if bits.is_complex() else bits
            bits = bits.view(_BITS[bits.element_size()])
            found.append(int(bits.sum(dtype=torch.int64)))
        except (RuntimeError, TypeError, NotImplementedError):  # a tensor of a kind of its own
            found.append(0)
    return found


def _refuse_other_parameters(window: Window, saved: list[int]) -> None:
    """Refuse to go on with a window whose first gradients are of other parameters."""
    if _checksums(window) != saved:
        raise StateError(
            f"the loaded window holds {window.now.micro_batches} micro-batches, whose gradients "
            "are of other parameters than those of the model here: load the model and the "
            "optimizer of the same checkpoint too, or discard() the window"
        )


def check_window(window: Window, saved: dict[str, Any] | None) -> None:
    """Raise a StateError if a saved window does not belong here; there may be none."""
    if saved is None:
        return
    target, gradients = window.target, saved["gradients"]
    window.store.check(gradients)
    if not isinstance(gradients, list):
        return  # kept in the optimizer's own state, which checks itself
    parameters = target.trained()
    if len(gradients) != len(parameters):
        raise StateError(
            f"the saved window holds gradients of {len(gradients)} parameters, and "
            f"{len(parameters)} are trained here: load it into the same model and optimizer"
        )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.shape != parameter.shape:
            raise StateError(
                f"the saved gradient of {target.name_of(parameter)} has shape "
                f"{tuple(gradient.shape)}, and the parameter has {tuple(parameter.shape)}: load "
                "it into the same model and optimizer"
            )


def load_window(window: Window, state: dict[str, Any] | None) -> None:
    """Open the window that `window_state` has saved, if there was one."""
    if state is None:
        return
    for parameter in window.target.trained():
        parameter.grad = None
    now = window.begin(known=state["known"])
    now.seed = state["seed"]
    now.micro_batches = state["micro_batches"]
    now.totals = {name: list(totals) for name, totals in state["totals"].items()}
    now.units = {name: list(units) for name, units in state["units"].items()}
    now.weights = dict(state["weights"])
    now.owners = list(state["owners"])
    now.loss_scale = state["loss_scale"]
    now.started = time.perf_counter() - state["seconds"]
    now.resumed = partial(_refuse_other_parameters, window, state["parameters"])
    window.store.load(state["gradients"])
