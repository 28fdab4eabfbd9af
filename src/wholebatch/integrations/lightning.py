"""Exact windows in Lightning's Trainer and in loops over Fabric.

```python
trainer = Trainer(
    accumulate_grad_batches=4,
    gradient_clip_val=1.0,
    callbacks=[ExactWindows(units=lambda batch: (batch["labels"] != -100).sum())],
)
```

In a loop over Fabric, `FabricWindows.backward` takes the place of `fabric.backward`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Policy
from wholebatch.core.loss import Loss, Units, mean_loss
from wholebatch.core.optional_packages import require
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError
from wholebatch.integrations.host_window import (
    FirstLook,
    Given,
    Gradients,
    Hosted,
    Options,
    Settled,
    all_parameters,
)

require("lightning", at_least="2.6", extra="lightning", purpose="wholebatch in Lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

__all__ = ["ExactWindows", "FabricWindows"]


REPLICATED = ("SingleDeviceStrategy", "DDPStrategy")  # every process holds whole gradients
_STRATEGIES = (*REPLICATED, "FSDPStrategy", "ModelParallelStrategy")


def gradients_of(strategy: Any) -> Gradients:
    return "whole" if type(strategy).__name__ in REPLICATED else "sharded"


def scales(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if name not in _STRATEGIES or getattr(strategy, "handles_gradient_accumulation", False):
        raise UnsupportedError(
            f"Lightning's {name}: the update is not shown to be that of the undivided batch; "
            f"supported are {', '.join(_STRATEGIES)}"
        )
    if getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto"):
        raise UnsupportedError(
            "Lightning's ModelParallelStrategy with tensor parallelism: units would be counted "
            "more than once over ranks that share a batch; use data parallelism alone"
        )


class FabricWindows:
    """Every update of a loop over Fabric is that of the undivided global batch.

    ```python
    windows = FabricWindows(fabric, model, optimizer)
    for index, batch in enumerate(loader):
        last = (index + 1) % steps == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])           # the mean
            windows.backward(mean=loss, units=len(batch["y"]), last=last)   # was fabric.backward
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    ```

    `backward(total, units=...)` takes a sum, `backward(mean=..., units=...)` a mean, and a
    `wb.Loss` is taken too. `last=True` completes the window: when it returns, the gradients are
    those of the whole batch on all ranks, and Fabric's clipping, loss scale and step go on from
    there. A loss or gradient that is not finite raises `NonFiniteError`, and no gradient is left;
    with `nonfinite="skip"` the loop's step then changes nothing.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batchnorm: str = "refuse",
        zero_units: Policy = "raise",
        nonfinite: Policy = "raise",
        audit: bool = True,
    ) -> None:
        if not isinstance(fabric, Fabric):
            raise OptionError(f"fabric={type(fabric).__name__}: must be a lightning.fabric.Fabric")
        check_strategy(fabric.strategy)
        self._fabric = fabric
        self._model = model
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer={type(optimizer).__name__}: must be what fabric.setup returned"
            )
        self._optimizer: torch.optim.Optimizer = inner
        self._audit = audit
        self._window = Hosted(
            [model],
            [inner],
            device=fabric.device,
            options=Options(batchnorm, zero_units, nonfinite, audit),
            gradients=gradients_of(fabric.strategy),
            is_scaled=lambda: scales(fabric.strategy.precision),
        )
        self._optimizer.register_step_pre_hook(self._refuse_open_window)

    @property
    def updates(self) -> int:
        """Windows that were completed so far."""
        return self._window.updates

    @property
    def last(self) -> Settled | None:
        """The window that was completed last."""
        return self._window.last

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped

    def backward(
        self,
        total: Tensor | Loss | None = None,
        *,
        units: Units | None = None,
        mean: Tensor | None = None,
        last: bool,
        **kwargs: Any,
    ) -> Settled | None:
        """Make the backward of one micro-batch's loss; `last` completes the window."""
        given = Given.of(total, units, mean, audit=self._audit)
        self._window.weigh(given, is_last=last)
        with self._window.backward():
            self._fabric.backward(given.loss, **kwargs)
        return self._window.settle(averaged_by=self._window.ranks.size) if last else None

    def discard(self) -> None:
        """Forget the open window, after an error; `optimizer.zero_grad()` is the loop's."""
        self._window.discard()

    def state_dict(self) -> dict[str, Any]:
        """For `fabric.save(path, {"windows": windows, ...})`: an open window is kept whole."""
        strategy = type(self._fabric.strategy).__name__
        if self._window.is_open and strategy not in REPLICATED:
            raise WindowError(
                f"the window is open with {self._window.micro_batches} micro-batches, and its "
                f"gradients are inside {strategy}: save between windows"
            )
        return self._window.state_dict(all_parameters([self._model], [self._optimizer]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state, all_parameters([self._model], [self._optimizer]))

    def _refuse_open_window(self, *_: Any) -> None:
        if self._window.is_open:
            raise WindowError(
                "optimizer.step() while the window is open: its last micro-batch's backward must "
                "say last=True"
            )


_LOGS = ("log", "log_dict")


class ExactWindows(Callback):
    """Every update of automatic optimisation is that of the undivided global batch.

    `training_step` goes on returning its mean loss: the mean is what Lightning calls the loss (a
    sum is a sum only in `backward(total, units=)`). `units(batch)` says what that is a mean over
    (samples, tokens, weights; a number or a 0-dim tensor); without it, `training_step` returns a
    dict with "loss" and "units". Before the optimizer's step, and before the Trainer clips, the
    gradients are those of the whole window on all ranks: with short last windows, with
    `GradientAccumulationScheduler`, with every precision plugin. `last` is the window that was
    completed last, with its exact mean `loss` and its `units`.

    A loss or gradient that is not finite raises `NonFiniteError` before the step, and no gradient
    is left; with `nonfinite="skip"` such a window makes no update (schedulers are stepped all the
    same). The precision plugin's loss scale skips by itself, as Lightning has it.
    """

    def __init__(
        self,
        units: Callable[[Any], Units] | None = None,
        *,
        batchnorm: str = "refuse",
        zero_units: Policy = "raise",
        nonfinite: Policy = "raise",
        audit: bool = True,
    ) -> None:
        if units is not None and not callable(units):
            raise OptionError(
                f"units={units!r}: must be a function of the batch, or None where training_step "
                'returns {"loss": ..., "units": ...}'
            )
        self._units = units
        self._options = Options(batchnorm, zero_units, nonfinite, audit)
        self._window: Hosted | None = None
        self._look: FirstLook | None = None
        self._saved: dict[str, Any] | None = None
        self._replaced: tuple[LightningModule, Any] | None = None
        self._parameters: list[nn.Parameter] | None = None
        self.last: Settled | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)
        self._window = Hosted(
            [pl_module],
            trainer.optimizers,
            device=pl_module.device,
            gradients=gradients_of(trainer.strategy),
            is_scaled=lambda: scales(trainer.precision_plugin),
            options=self._options,
            owns_forward=True,
        )
        self._look = FirstLook(
            pl_module, self._window, host=self, off="ExactWindows(..., audit=False)"
        )
        replicated = type(trainer.strategy).__name__ in REPLICATED
        self._parameters = all_parameters([pl_module], trainer.optimizers) if replicated else None
        saved, self._saved = self._saved, None
        if saved is not None:
            self._window.updates = saved["updates"]
        if saved is not None and "window" in saved:
            self._window.load_state_dict(saved["window"], self._parameters)
        self._take_training_step(trainer, pl_module)

    def _take_training_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what training_step returns, on its way to the Trainer."""
        found = pl_module.__dict__.get("training_step")  # a compiled one, or none of its own
        inner = pl_module.training_step

        @functools.wraps(inner)  # Lightning looks at what arguments it takes
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._look_first(trainer, pl_module, inner, args, kwargs)
            output = inner(*args, **kwargs)
            if trainer.training and torch.is_grad_enabled():  # not a validation_step that calls it
                self._weigh(trainer, output, args, kwargs)
            return output

        self._replaced = (pl_module, found)
        pl_module.__dict__["training_step"] = training_step

    def _look_first(
        self,
        trainer: Trainer,
        module: LightningModule,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Before the first window in parts: does the loss of some samples add up?"""
        look, window = self._look, self._window
        assert look is not None
        assert window is not None
        if not (look.pending and trainer.training and torch.is_grad_enabled()):
            return
        if trainer.accumulate_grad_batches == 1 and window.ranks.size == 1:
            return
        name, batch = (None, args[0]) if args else next(iter(kwargs.items()))

        def run(few: Any) -> Loss:
            given = (few, *args[1:]) if name is None else ()
            output = step(*given, **({**kwargs, name: few} if name is not None else kwargs))
            mean: Any = output.get("loss") if isinstance(output, Mapping) else output
            return mean_loss(mean, self._units_of(output, few))

        with _muted(module):
            look.at(run, batch)

    def _units_of(self, output: Any, batch: Any) -> Units:
        if self._units is not None:
            return self._units(batch)
        if isinstance(output, Mapping) and "units" in output:
            units: Units = output["units"]
            return units
        raise LossError(
            "nothing says what the loss is a mean over: pass ExactWindows(units=a function of "
            'the batch), or return {"loss": ..., "units": ...} from training_step'
        )

    def _weigh(
        self, trainer: Trainer, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        assert self._window is not None
        if output is None and self._window.ranks.size > 1:
            raise LossError(
                "training_step returned None on one of several processes, and the others wait for "
                "its backward: return a loss with 0 units for a batch that does not count"
            )
        mean = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(mean, Tensor):
            return  # Lightning says what is wrong with it
        units = self._units_of(output, args[0] if args else next(iter(kwargs.values())))
        given = Given.of(mean=mean, units=units)
        steps = trainer.accumulate_grad_batches
        self._window.weigh(given, divided_by=steps, is_last=steps == 1)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Lightning has cleared the gradients, where a window begins."""
        if self._window is not None and self._window.is_open:
            self._window.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None and self._window.is_open:
            self._window.after_backward()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Where Lightning is about to clear the gradients, nothing of a window may be left."""
        first = batch_idx % trainer.accumulate_grad_batches == 0
        if first and self._window is not None and self._window.is_open:
            self._window.discard()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        window = self._window
        if window is None or not window.is_open:
            return
        self.last = window.settle(averaged_by=window.ranks.size)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self._window is not None:
            self._window.detach()
        if self._replaced is None:
            return
        module, found = self._replaced
        self._replaced = None
        if found is None:
            del module.__dict__["training_step"]
        else:
            module.__dict__["training_step"] = found

    def state_dict(self) -> dict[str, Any]:
        """The number of windows, and one that is open with its gradients (added over the ranks)."""
        if self._window is None:
            return {"updates": 0}
        found: dict[str, Any] = {"updates": self._window.updates}
        if self._window.is_open and self._parameters is not None:
            found["window"] = self._window.state_dict(self._parameters)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)


def _check(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimises by hand, so its windows are its own: use a "
            "wb.Accumulator in training_step, or automatic optimisation"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            f"{type(module).__name__}.training_step takes dataloader_iter: Lightning then clears "
            "the gradients one micro-batch late; take (batch, batch_idx)"
        )
    check_strategy(trainer.strategy)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in a step; a window's gradient is made "
                "once, so use an optimizer whose step needs no closure"
            )


@contextmanager
def _muted(module: LightningModule) -> Iterator[None]:
    """Within it `self.log` of the module writes nothing down."""
    found = {name: module.__dict__[name] for name in _LOGS if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(_LOGS, _nothing))
    try:
        yield
    finally:
        for name in _LOGS:
            del module.__dict__[name]
        module.__dict__.update(found)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a module's log."""
