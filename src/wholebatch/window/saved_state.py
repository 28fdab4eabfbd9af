"""The state that a run saves between windows: counters, scalers, schedulers and generators."""

from __future__ import annotations

from typing import Any

from torch import nn

from wholebatch.errors import StateError
from wholebatch.window.forward_state import capture_random, restore_random
from wholebatch.window.ledger import Ledger
from wholebatch.window.model_and_optimizer import Schedules

FORMAT = 2
"""The version of what is saved."""


def state_of(ledger: Ledger, kind: str) -> dict[str, Any]:
    """Return what every object of windows saves (`kind`: its class): counters and generators.

    The model and the optimizer are saved by their own `state_dict`, as everywhere in torch.
    """
    target = ledger.target
    if ledger.open is not None:
        raise StateError(
            f"state_dict() in an open window (micro-batches so far: {ledger.held}): "
            "save where backward() or run() returned a Step (`if step is not None:`). A window "
            "that was interrupted is computed again, with the same update"
        )
    return {
        "format": FORMAT,
        "kind": kind,
        "updates": ledger.updates,
        "skipped": ledger.skipped,
        "next_seed": ledger.next_seed,
        "scaler": None if target.scale is None else target.scale.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in target.schedulers],
        "ema": target.ema.state_dict() if isinstance(target.ema, nn.Module) else None,
        "random": capture_random(),
    }


def load_state(ledger: Ledger, kind: str, state: dict[str, Any]) -> None:
    """Load `state_dict`; a StateError, with nothing changed, says that it is not of here."""
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is not a state dict of wholebatch (it has no 'format')")
    if state["format"] != FORMAT:
        raise StateError(
            f"state dict of format {state['format']}, this version reads format {FORMAT}: "
            "use the version of wholebatch that wrote it"
        )
    if state["kind"] != kind:
        raise StateError(f"state dict of {state['kind']}: cannot be loaded into {kind}")
    target = ledger.target
    if (state["scaler"] is None) != (target.scale is None):
        raise StateError(
            "loss scaling differs: the state was saved "
            f"{'without' if state['scaler'] is None else 'with'} a scaler; use the same "
            "precision"
        )
    if len(state["schedulers"]) != len(target.schedulers):
        raise StateError(
            f"the state holds {len(state['schedulers'])} schedulers, and "
            f"{len(target.schedulers)} are here: pass the same ones"
        )
    if ledger.open is not None:
        ledger.discard()

    ledger.count_from(state["updates"], state["skipped"], state["next_seed"])
    if target.scale is not None:
        target.scale.load_state_dict(state["scaler"])
    for scheduler, saved in zip(target.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    ledger.schedules = Schedules(target.schedulers)
    if isinstance(target.ema, nn.Module) and state["ema"] is not None:
        target.ema.load_state_dict(state["ema"])
    restore_random(state["random"])
