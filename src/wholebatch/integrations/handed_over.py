"""Windows that leave the optimizer step to the library: Accelerate, Fabric, Lightning.

The last backward of a window leaves the gradient of the whole global batch in `.grad`. Whatever the
library does then (clip, unscale, step, schedule, clear) works on the right gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.accumulator import Accumulator
from wholebatch.errors import UnsupportedError, WindowError
from wholebatch.options import Close, close_with_only
from wholebatch.window.close import Handover
from wholebatch.window.observer import Observer
from wholebatch.window.precision import LossScale
from wholebatch.window.window import Step


class LibraryScale(LossScale):
    """The loss scale of a library's GradScaler, which unscales and skips by itself before its step.

    `owner` has the scaler as its attribute `scaler`.
    """

    is_undone_at_close = False

    def __init__(self, owner: Any, device: torch.device) -> None:
        self._owner, self._device = owner, device

    @property
    def scaler(self) -> Any:  # type: ignore[override]
        """The library's GradScaler."""
        return self._owner.scaler

    def value(self) -> float:
        """Return the scale; the library's unscaling needs a scaler that has scaled something."""
        return float(self.scaler.scale(torch.ones((), device=self._device)))

    def update(self, *, finite: bool) -> None:
        return


def handed_over_close(close: Close | None) -> Close:
    """Return the options of a close whose clipping, scaling and step are the library's."""
    return close_with_only(close, "nonfinite", "zero_units", where="where the library steps")


class HandedOver(Accumulator):
    """An Accumulator that leaves the whole gradient to the library's own step.

    `scaled_by` has the library's GradScaler as its attribute `scaler`, if there is one. `options`
    are those of `Accumulator`.
    """

    _handover = Handover(
        lends=True,  # the library clears them before the next window
        counts=True,
        stray="holds a gradient at the first backward of a window, which would be added to it: "
        "call optimizer.step() and optimizer.zero_grad() after every window, and give every loss "
        "to windows.backward()",
    )
    closes_by: ClassVar[str] = "windows.flush()"
    """The call that closes a window whose last micro-batch made no backward, for error messages."""
    guards_steps: ClassVar[bool] = True
    """True if a step of the optimizer must find a closed window."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        steps: int | Callable[[int], int],
        scaled_by: object,
        close: Close | None,
        **options: Any,
    ) -> None:
        scaler: Any = None
        if getattr(scaled_by, "scaler", None) is not None:
            scaler = LibraryScale(scaled_by, optimizers[0].param_groups[0]["params"][0].device)
        super().__init__(
            model,
            optimizers if len(optimizers) > 1 else optimizers[0],
            steps=steps,
            close=replace(handed_over_close(close), scaler=scaler),
            **options,
        )
        self._is_completed = False  # a window was closed, and no step was made from it
        self._step_hooks: list[Any] = []
        if self.guards_steps and not self._ledger.sync.owns_step:
            for optimizer in self._ledger.target.optimizers:
                self._step_hooks.append(optimizer.register_step_pre_hook(self._before_step))
                self._step_hooks.append(optimizer.register_step_post_hook(self._after_step))

    def _after_close(self, step: Step) -> None:
        """Note that the library may step; its scaler needs a gradient to skip the step by."""
        ledger = self._ledger
        if ledger.sync.owns_step:
            return
        self._is_completed = True
        scale = ledger.target.scale
        if step.skipped is not None and scale is not None and scale.enabled:
            for optimizer in ledger.target.optimizers:
                first = optimizer.param_groups[0]["params"][0]
                first.grad = torch.full_like(first, math.nan)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step from a part of a window, and one from gradients that no window made."""
        if self._ledger.open is not None:
            raise WindowError(f"optimizer.step() while the window is open: {self.closes_by}")
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if not self._is_completed and any(p.grad is not None for p in parameters):
            raise WindowError(
                "optimizer.step() with gradients that no window computed, so they are not those "
                "of the whole batch. Pass every loss to windows.backward() of this "
                f"{type(self).__name__} instead of the library's own backward(); to go on without "
                "it, call windows.detach()"
            )

    def _after_step(self, *_: Any) -> None:
        self._is_completed = False

    def detach(self) -> None:
        """Leave models and optimizers as they were found (a conversion of BatchNorm is kept)."""
        while self._step_hooks:
            self._step_hooks.pop().remove()
        self._ledger.hooks.give_back()
        self._functions.clear()  # graphs leave the device's memory
        self._ledger.observer = Observer()
        for policy in self._batchnorms:
            policy.detach()
        for model in self._ledger.target.models:
            if isinstance(model, DistributedDataParallel):  # its own reductions begin again
                model.require_backward_grad_sync = model.require_forward_param_sync = True


def refuse_shared_batches(accelerator: Any, host: str) -> None:
    """Refuse an Accelerator whose ranks share batches, so that units would be counted twice."""
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_size", 1) > 1:
            raise UnsupportedError(
                f"{host} with {name}_size={getattr(parallel, f'{name}_size')}: units would be "
                "counted more than once over ranks that share a batch; use data parallelism alone"
            )


def samples_of_last_batches(accelerator: Any) -> tuple[int, int] | None:
    """Return a rank's batch size, and the samples of all ranks' last batches that are not repeats.

    None where Accelerate repeats no samples to make the ranks equal.
    """
    ranks, state = accelerator.num_processes, accelerator.gradient_state
    loader = state.active_dataloader
    if ranks == 1:
        return None
    if hasattr(loader, "slice_fn"):  # the first rank reads for all; it is known at the end
        left = state.remainder if state.end_of_dataloader else 0
        return (-(-left // ranks), left) if left % ranks else None
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "skip_batches"):  # of a resumed epoch
        batches = batches.batch_sampler
    if not getattr(batches, "even_batches", False) or batches.drop_last or not batches.batch_size:
        return None
    size = batches.batch_size // ranks if batches.split_batches else batches.batch_size
    left = len(batches.batch_sampler.sampler) % (size * ranks)
    return (size, left) if left else None
