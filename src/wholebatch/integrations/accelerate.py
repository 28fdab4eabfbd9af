"""Exact gradient accumulation for an Accelerate loop.

`AccelerateAccumulator.backward` takes the place of `accelerator.backward`; the loop stays:

```python
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
windows = AccelerateAccumulator(accelerator, model, optimizer)
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

`backward(total, units=...)` takes a sum, as everywhere in wholebatch. `windows.run(loss, batch)`
takes the loss function instead, and runs the micro-batch as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.compile import Execute
from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.integrations.handed_over import (
    HandedOver,
    refuse_shared_batches,
    samples_of_last_batches,
)
from wholebatch.optional_packages import require
from wholebatch.options import Close
from wholebatch.warn_user import warn_user

require("accelerate", at_least="1.13", extra="accelerate", purpose="wholebatch in Accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

__all__ = ["AccelerateAccumulator"]

_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)


class AccelerateAccumulator(HandedOver):
    """Exact gradient accumulation for an Accelerate loop.

    Call `backward(mean=loss, units=...)` instead of `accelerator.backward(loss)`. It also takes a
    sum, `backward(total, units=...)`, or a `wb.Loss`. `units` is the number of samples, tokens or
    weights that the loss is over (a number or a 0-dim tensor). After the last micro-batch of a
    window, the gradients are those of the whole batch on all processes, and Accelerate's own
    clipping, loss scaling, optimizer and scheduler work on them. `backward` returns the window's
    `wb.Step` when it is complete, else None.

    A loss or gradient that is not finite raises `NonFiniteError` before the step, and no gradient
    is left; with `close=wb.Close(nonfinite="skip")` such a window makes no update, but a
    scheduler that the loop steps still steps. With fp16, Accelerate's loss scaler skips such
    updates.
    """

    _closes_the_last = "prepare the loader with accelerator.prepare()"
    closes_by = (
        "windows.backward() was not called for its last micro-batch, so its gradients are not "
        "complete; call windows.flush() before clipping and stepping"
    )

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        execute: Execute = "auto",
        batchnorm: str = "refuse",
        close: Close | None = None,
        audit: bool = True,
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        self._micro_step = accelerator.step  # what accumulate() counts up
        self._warns_of_repeats = True
        super().__init__(
            model,
            _torch_optimizers(optimizer),
            steps=accelerator.gradient_accumulation_steps,
            scaled_by=accelerator,
            execute=execute,
            batchnorm=batchnorm,
            close=close,
            audit=audit,
        )

    def _last_of(self, last: bool | None) -> bool | None:
        """Return what Accelerate says: it synchronises in the last micro-batch of a window."""
        self._refuse_loop_without_accumulate()
        if self._ledger.open is None:
            self.steps = self._accelerator.gradient_accumulation_steps
        if self._warns_of_repeats and samples_of_last_batches(self._accelerator) is not None:
            self._warns_of_repeats = False
            warn_user(
                "Accelerate repeats samples at the end of an epoch to make the ranks equal, and "
                "they count twice in its last window: give the DataLoader drop_last=True"
            )
        return bool(self._accelerator.sync_gradients)

    def _refuse_loop_without_accumulate(self) -> None:
        """Refuse a loop without `accelerator.accumulate()`, which counts the micro-batches."""
        accelerator, micro_step = self._accelerator, self._accelerator.step
        moved = micro_step != self._micro_step
        self._micro_step = micro_step
        steps = accelerator.gradient_accumulation_steps
        if (
            accelerator.sync_gradients
            and steps > 1
            and not moved
            and self._ledger.open is None
            and not accelerator.gradient_state.end_of_dataloader
        ):
            raise WindowError(
                f"gradient_accumulation_steps={steps}, but accelerator.sync_gradients is True and "
                "accelerator.accumulate() was not used, so every micro-batch would make a step: "
                "put the loop's body into `with accelerator.accumulate(model):`"
            )


def _torch_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    prepared: list[Any] = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    )
    for each in prepared:
        if not isinstance(each, AcceleratedOptimizer):
            raise OptionError(
                f"optimizer={type(each).__name__}: must be what accelerator.prepare returned"
            )
    return [each.optimizer for each in prepared]


def _check(accelerator: Accelerator) -> None:
    if not isinstance(accelerator, Accelerator):
        raise OptionError(
            f"accelerator={type(accelerator).__name__}: must be an accelerate.Accelerator"
        )
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED:
        raise UnsupportedError(
            f"Accelerate with {kind}: not tested to make the update of the undivided batch; "
            "supported are one process, DDP, FSDP2 and DeepSpeed on CPU and CUDA"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError(
            "Accelerate with FSDP1 (FullyShardedDataParallel), which reduces gradients by its own "
            "rules: set fsdp_version=2 in its FSDP plugin"
        )
    refuse_shared_batches(accelerator, "Accelerate")
