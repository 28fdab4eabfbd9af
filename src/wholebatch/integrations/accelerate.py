"""Exact windows in a loop of Accelerate's.

`ExactWindows` keeps the loop as it is and takes the place of `accelerator.backward`:

```python
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
windows = ExactWindows(accelerator, model, optimizer)
for batch in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])     # the mean, as before
        windows.backward(mean=loss, units=len(batch["y"]))        # was accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
```

`backward(total, units=...)` takes a sum, as everywhere in wholebatch.

`accumulator` gives a `wb.Accumulator` over what Accelerate prepared, for a loop that is written
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.accumulator import Accumulator
from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.integrations.host_window import (
    AdapterOptions,
    GradientsIn,
    LoopWindows,
    Settled,
    refuse_shared_batches,
)
from wholebatch.losses.loss import Loss, Units
from wholebatch.make_window import make_window
from wholebatch.optional_packages import require
from wholebatch.options import Close, Memory
from wholebatch.stream import AddedLoss, GivenLoss
from wholebatch.window.close import Policy
from wholebatch.window.window import Step

require("accelerate", at_least="1.15", extra="accelerate", purpose="wholebatch in Accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

__all__ = ["ExactWindows", "accumulator"]

_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)

_REPLICATED = _SUPPORTED[:3]  # every process holds whole gradients


class ExactWindows(LoopWindows):
    """Windows in Accelerate's loop, each of whose updates is that of the undivided global batch.

    `backward(mean=loss, units=...)` stands for `accelerator.backward(loss)`, where the loss is the
    micro-batch's mean; `backward(total, units=...)` takes its sum, and a `wb.Loss` is taken too.
    `units` is what it is over (samples, tokens, weights; a number or a 0-dim tensor). When it
    returns in the last micro-batch of a window, the gradients are those of the whole batch,
    reduced, and Accelerate's own clipping, loss scaling, optimizer and scheduler go on from there.
    It returns what the window was (`loss`, `units`), or None within a window.

    A loss or gradient that is not finite raises `NonFiniteError` before the step, and no gradient
    is left; with `nonfinite="skip"` such a window makes no update (a scheduler that the loop steps
    is stepped all the same). fp16's loss scale skips by itself, as Accelerate has it.
    """

    save_when = "when accelerator.sync_gradients"
    step_after = (
        "its last micro-batch made no windows.backward(), so its gradients are not complete; call "
        "windows.settle() before clipping and stepping"
    )

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        batchnorm: str = "refuse",
        zero_units: Policy = "raise",
        nonfinite: Policy = "raise",
        audit: bool = True,
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = _torch_optimizers(optimizer)
        self._place = accelerator.step  # what accumulate() counts up
        self.engine_kind = accelerator.distributed_type
        options, window = AdapterOptions(batchnorm, zero_units, nonfinite, audit), None
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            if len(models) > 1:
                raise UnsupportedError(
                    "several DeepSpeed engines in one ExactWindows: give each one of its own"
                )
            close = Close(zero_units=zero_units, nonfinite=nonfinite)
            window = make_window(
                models[0],
                optimizers[0],
                clip_norm=None,
                scheduler=None,
                memory=Memory(),
                close=close,
            )
            optimizers = []
        super().__init__(
            models,
            optimizers,
            device=accelerator.device,
            options=options,
            gradients=_gradients_in(accelerator),
            scaled_by=accelerator,
            divided_by=lambda: float(accelerator.gradient_accumulation_steps),
            window=window,
        )

    def backward(
        self,
        total: Tensor | Loss | AddedLoss | None = None,
        *,
        units: Units | None = None,
        mean: Tensor | None = None,
        **kwargs: Any,
    ) -> Settled | None:
        """Make the backward of one micro-batch's loss: its sum, or its mean, over `units`.

        The loss of a function of `compile` is only entered.
        """
        accelerator, is_last = self._accelerator, self._accelerator.sync_gradients
        if isinstance(total, AddedLoss):
            self._refuse_loop_without_accumulate(is_last)
            self.take(total)
            return self.settle() if is_last else None
        given = GivenLoss.of(total, units, mean)
        self._refuse_loop_without_accumulate(is_last)
        if self.kept == "elsewhere":  # its engine makes the update too
            self.add(given, last=is_last)
        else:
            self.weigh(given, is_last=is_last)
            with self.host_backward():
                accelerator.backward(given.loss, **kwargs)
        return self.settle() if is_last else None

    def _refuse_loop_without_accumulate(self, is_last: bool) -> None:
        """Refuse windows of one micro-batch because nobody counts the micro-batches."""
        accelerator, place = self._accelerator, self._accelerator.step
        moved = place != self._place
        self._place = place
        steps = accelerator.gradient_accumulation_steps
        if (
            is_last
            and steps > 1
            and not moved
            and self.open is None
            and not accelerator.gradient_state.end_of_dataloader
        ):
            raise WindowError(
                f"gradient_accumulation_steps={steps}, but accelerator.sync_gradients is True and "
                "accelerator.accumulate() was not entered, so every micro-batch would make a step: "
                "put the loop's body into `with accelerator.accumulate(model):`"
            )


def accumulator(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    **options: Any,
) -> Accumulator:
    """Return a `wb.Accumulator` over what `accelerator.prepare` gave.

    ```python
    acc = accumulator(accelerator, model, optimizer, scheduler, clip_norm=1.0)
    for batch in acc.over(loader):
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        step = acc.backward(total, units=len(batch["y"]))
    ```

    Windows have `steps=` micro-batches, or `accelerator.gradient_accumulation_steps` where that
    is more than 1. The loss scale of fp16 is Accelerate's; a prepared scheduler steps as Accelerate
    steps it. Leave out `accelerator.accumulate`, `optimizer.step`, `scheduler.step` and
    `optimizer.zero_grad`.
    """
    _check(accelerator)
    close = Close.of(options.pop("close", None))
    if close.scaler is not None:
        raise OptionError("scaler= beside an Accelerator, which has its own: leave it out")
    steps = accelerator.gradient_accumulation_steps
    if "steps" not in options and steps == 1:
        raise OptionError(
            "accumulator() without steps= and an Accelerator with gradient_accumulation_steps=1: "
            "every micro-batch would make an update; pass steps=, the micro-batches of a window "
            "(steps=1 if you mean it)"
        )
    options.setdefault("steps", steps)
    optimizers = _torch_optimizers(optimizer)
    acc = _PreparedAccumulator(
        model,
        optimizers if len(optimizers) > 1 else optimizers[0],
        scheduler=scheduler,
        close=replace(close, scaler=getattr(accelerator, "scaler", None)),
        **options,
    )
    acc.watch(accelerator)
    return acc


class _PreparedAccumulator(Accumulator):
    """An Accumulator that notices when the loop has kept `accelerator.accumulate`."""

    def watch(self, accelerator: Accelerator) -> None:
        self._accelerator, self._place = accelerator, accelerator.step

    def backward(self, *args: Any, **kwargs: Any) -> Step | None:
        if self._accelerator.step != self._place or not self._accelerator.sync_gradients:
            raise WindowError(
                "accelerator.accumulate() beside an accumulator, which holds the synchronisation "
                "and counts the micro-batches itself: remove accelerator.accumulate() from the loop"
            )
        return super().backward(*args, **kwargs)


def _gradients_in(accelerator: Accelerator) -> GradientsIn:
    """Return where Accelerate's engine keeps gradients within a window."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "elsewhere"
    return "whole" if accelerator.distributed_type in _REPLICATED else "sharded"


def _torch_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    given: list[Any] = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    )
    for one in given:
        if not isinstance(one, AcceleratedOptimizer):
            raise OptionError(
                f"optimizer={type(one).__name__}: must be what accelerator.prepare returned"
            )
    return [one.optimizer for one in given]


def _check(accelerator: Accelerator) -> None:
    if not isinstance(accelerator, Accelerator):
        raise OptionError(
            f"accelerator={type(accelerator).__name__}: must be an accelerate.Accelerator"
        )
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED:
        raise UnsupportedError(
            f"Accelerate with {kind}: the update is not shown to be that of the undivided batch; "
            "supported are one process, DDP, FSDP and DeepSpeed on CPU and CUDA"
        )
    refuse_shared_batches(accelerator, "Accelerate")
