"""make_ledger: choose the engine and the gradient store of a run, and check its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from wholebatch.distributed import choose as choose_sync
from wholebatch.offload import choose as choose_store
from wholebatch.options import Close, Memory, close_options
from wholebatch.window.close import Handover
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.ledger import Ledger
from wholebatch.window.model_and_optimizer import Scheduler, build_target


def make_ledger(
    models: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    clip_norm: ClipNorm,
    scheduler: Scheduler | Sequence[Scheduler] | None,
    memory: Memory,
    close: Close,
    precision: str = "full",
    handover: Handover | None = None,
    fits: Callable[[int], bool] | None = None,
) -> Ledger:
    """Return the ledger of these models and optimizers; refuse what does not go together.

    `fits`: see `wholebatch.distributed.choose`. `handover`: how a library that makes the step gets
    the gradients.
    """
    options = close_options(close, clip_norm)
    sync = choose_sync(models, sync=close.sync, fits=fits)
    target = build_target(
        models,
        optimizer,
        options=options,
        scheduler=scheduler,
        ema=close.ema,
        precision=precision,
        scaler=close.scaler,
        sync=sync,
    )
    store = choose_store(
        memory.optimizer_state,
        target=target,
        options=options,
        sync=sync,
        on_gradient=close.on_gradient is not None,
        handover=handover,
    )
    return Ledger(target, options, sync, store, close.on_gradient, close.on_open)
