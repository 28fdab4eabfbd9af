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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from wholebatch.compile import Execute
from wholebatch.errors import LossError, OptionError, UnsupportedError
from wholebatch.integrations.host_window import (
    AdapterOptions,
    FirstLook,
    GradientsIn,
    HostWindows,
    LoopWindows,
    Settled,
)
from wholebatch.losses.loss import Loss, Units, mean_loss
from wholebatch.optional_packages import require
from wholebatch.stream import AddedLoss, GivenLoss
from wholebatch.window.close import Policy
from wholebatch.window.forward_state import replaced_attributes

require("lightning", at_least="2.6", extra="lightning", purpose="wholebatch in Lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric import wrappers as fabric_wrappers  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

__all__ = ["ExactWindows", "FabricWindows"]


_REPLICATED = ("SingleDeviceStrategy", "DDPStrategy")  # every process holds whole gradients
_STRATEGIES = (*_REPLICATED, "FSDPStrategy", "ModelParallelStrategy")


def _gradients_in(strategy: Any) -> GradientsIn:
    return "whole" if type(strategy).__name__ in _REPLICATED else "sharded"


def _check_strategy(strategy: Any) -> None:
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


class FabricWindows(LoopWindows):
    """Windows in a loop over Fabric, each of whose updates is that of the undivided global batch.

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

    save_when = "between windows"
    step_after = "its last micro-batch's backward must say last=True"

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
        _check_strategy(fabric.strategy)
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer={type(optimizer).__name__}: must be what fabric.setup returned"
            )
        self._fabric, self.engine_kind = fabric, type(fabric.strategy).__name__
        super().__init__(
            [model],
            [inner],
            device=fabric.device,
            options=AdapterOptions(batchnorm, zero_units, nonfinite, audit),
            gradients=_gradients_in(fabric.strategy),
            scaled_by=fabric.strategy.precision,
            inside=_in_fabric_backward,
        )

    def backward(
        self,
        total: Tensor | Loss | AddedLoss | None = None,
        *,
        units: Units | None = None,
        mean: Tensor | None = None,
        last: bool,
        **kwargs: Any,
    ) -> Settled | None:
        """Make the backward of one micro-batch's loss; `last` completes the window.

        The loss of a function of `compile` is only entered.
        """
        if isinstance(total, AddedLoss):
            self.take(total)
        else:
            given = GivenLoss.of(total, units, mean)
            self.weigh(given, is_last=last)
            with self.host_backward():
                self._fabric.backward(given.loss, **kwargs)
        return self.settle() if last else None


def _in_fabric_backward() -> AbstractContextManager[None]:
    """Let backwards pass that are not made by fabric.backward, whose loss scale a seed has."""
    return replaced_attributes(fabric_wrappers, _in_fabric_backward=True)


class ExactWindows(Callback):
    """A callback for updates of automatic optimisation that are those of the undivided batch.

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

    On a GPU, training_step, its backward and the addition run as one graph (`execute="auto"`), as
    far as its code allows that: what it logs must be tensors, and it must not read batch_idx.
    `precision="fp8"` computes linear layers in 8 bits and the rest in bf16, as in `WholeBatch`.
    """

    def __init__(
        self,
        units: Callable[[Any], Units] | None = None,
        *,
        execute: Execute = "auto",
        precision: Literal["fp8"] | None = None,
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
        self._units, self._execute, self._precision = units, execute, precision
        self._options = AdapterOptions(batchnorm, zero_units, nonfinite, audit)
        self._windows: HostWindows | None = None
        self._given: GivenLoss | None = None  # the loss whose backward comes next
        self._step: CompiledStep | None = None
        self._saved: dict[str, Any] | None = None
        self._replaced = ExitStack()
        self.last: Settled | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)
        saved, self._saved = self._saved or {}, None
        windows = self._windows = HostWindows(
            [pl_module],
            trainer.optimizers,
            device=pl_module.device,
            gradients=_gradients_in(trainer.strategy),
            scaled_by=trainer.precision_plugin,
            options=self._options,
            owns_forward=True,
            divided_by=lambda: trainer.accumulate_grad_batches,
            updates=saved.get("updates", 0),
        )
        if "window" in saved:
            windows.load_state_dict(saved["window"])
        self._take_training_step(trainer, pl_module, windows)

    def _take_training_step(
        self, trainer: Trainer, module: LightningModule, windows: HostWindows
    ) -> None:
        """Replace training_step by one that weighs the loss on its way to the Trainer."""
        inner, clear = module.training_step, module.optimizer_zero_grad
        how = (self._execute, self._precision)
        compiled = self._step = CompiledStep(module, windows, self._units_of, *how)
        look = FirstLook(module, windows, host=self, off="ExactWindows(..., audit=False)")

        @functools.wraps(inner)  # Lightning looks at what arguments it takes
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not (trainer.training and torch.is_grad_enabled()):  # called in a validation_step
                return inner(*args, **kwargs)
            name, batch = (None, args[0]) if args else next(iter(kwargs.items()))

            def step(batch: Any) -> Any:
                if name is None:
                    return inner(batch, *args[1:], **kwargs)
                return inner(**{**kwargs, name: batch})

            def run(few: Any) -> Loss:
                output = step(few)
                return mean_loss(_mean_in(output), self._units_of(output, few))

            in_parts = trainer.accumulate_grad_batches > 1 or windows.sync.ranks > 1
            if in_parts and look.pending:
                with replaced_attributes(module, log=_log_nothing, log_dict=_log_nothing):
                    steps = trainer.accumulate_grad_batches
                    look.at(run, batch, micro_batch=None, steps=steps)
            if compiled.runs:
                if windows.open is None:
                    for optimizer in trainer.optimizers:  # Lightning would do it too late
                        clear(trainer.current_epoch, trainer.global_step, optimizer)
                return compiled(args, kwargs)
            output = step(batch)
            self._take_loss(output, batch, alone=windows.sync.ranks == 1)
            return output

        def zero_grad(epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            if not compiled.runs:
                clear(epoch, batch_idx, optimizer)

        self._replaced.enter_context(
            replaced_attributes(module, training_step=training_step, optimizer_zero_grad=zero_grad)
        )

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

    def _take_loss(self, output: Any, batch: Any, *, alone: bool) -> None:
        if output is None and not alone:
            raise LossError(
                "training_step returned None on one of several processes, and the others wait for "
                "its backward: return loss * 0 with 0 units for a batch that does not count"
            )
        mean = _mean_in(output)
        if not isinstance(mean, Tensor):
            return  # Lightning says what is wrong with it
        self._given = GivenLoss.of(mean=mean, units=self._units_of(output, batch))

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        """Weigh the loss; Lightning has cleared the gradients where a window begins."""
        if self._windows is not None and self._given is not None:
            self._windows.weigh(self._given, is_last=trainer.accumulate_grad_batches == 1)

    def on_after_backward(self, *_: Any) -> None:
        given, self._given = self._given, None
        if self._windows is not None and given is not None:
            self._windows.backward_made()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop what is left of a window where Lightning is about to clear the gradients."""
        first = batch_idx % trainer.accumulate_grad_batches == 0
        self._given = None
        if first and self._windows is not None and self._windows.open is not None:
            self._windows.discard()

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._windows is not None and self._windows.open is not None:
            self.last = self._windows.settle()

    def on_train_end(self, *_: Any) -> None:
        """Leave the module as it was found."""
        if self._windows is not None:
            self._windows.detach()
        self._replaced.close()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of windows, and an open one with its gradients (of all ranks)."""
        windows = self._windows
        if windows is None:
            return {"updates": 0}
        found: dict[str, Any] = {"updates": windows.updates}
        if windows.open is not None and windows.kept == "whole":
            found["window"] = windows.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)


class CompiledStep:
    """A training_step with its backward as one graph. What it logs is logged after every call."""

    def __init__(
        self,
        module: LightningModule,
        windows: HostWindows,
        units_of: Callable[[Any, Any], Units],
        execute: Execute,
        precision: str | None,
    ) -> None:
        self._module, self._windows, self._units_of = module, windows, units_of
        self._step: Callable[..., Any] = module.training_step
        self._rest: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._logged: dict[str, tuple[str, dict[str, Any]]] = {}  # by the name of the extra
        self._ran = False  # True if this call has run the code itself, with its log
        self._output: dict[str, Any] = {}  # of the code itself
        self._loss = windows.compiled(self._run, execute, self._step, precision)
        plain = self._loss.executor.is_eager and precision is None
        self.runs = windows.sync.ranks == 1 and not plain
        """True if training_step runs this way: in one process, where graphs may pay."""
        if precision is not None and not self.runs:
            raise UnsupportedError(
                f"ExactWindows(precision={precision!r}) on {windows.sync.ranks} ranks: Lightning "
                "runs training_step itself there; use its own precision, or one process"
            )

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Run training_step; return its output, whose loss has had its backward."""
        name, batch = (None, args[0]) if args else next(iter(kwargs.items()))
        self._rest = args[1:], {key: value for key, value in kwargs.items() if key != name}
        self._ran = False
        try:
            added = self._loss(batch, name)
        except _NoLoss as skipped:
            return skipped.output
        self._windows.take(added)
        extras = dict(added.extras)
        for place, (key, options) in self._logged.items():
            if place in extras:
                value = extras.pop(place)
                if not self._ran:
                    self._module.log(key, value, **options)
        mean = extras.pop("loss").requires_grad_()  # Lightning's backward ends at this leaf
        others = (
            self._output if self._ran else {k.removeprefix("output "): extras[k] for k in extras}
        )
        return {**others, "loss": mean}

    def _run(self, batch: Any, name: str | None) -> Loss:
        """Run training_step on a batch, and return its loss with everything that it logs."""
        is_traced = bool(torch._C._len_torch_dispatch_stack())
        self._ran |= not is_traced
        rest, options = self._rest
        if is_traced:
            rest = tuple(map(_unread, rest))
            options = {key: _unread(value) for key, value in options.items()}
        logged: dict[str, Tensor] = {}
        log = self._log_into(logged, is_traced)

        def log_dict(values: Mapping[str, Any], **given: Any) -> None:
            for key, value in values.items():
                log(key, value, **given)

        with replaced_attributes(self._module, log=log, log_dict=log_dict):
            named = {} if name is None else {name: batch}
            output = self._step(*(() if named else (batch,)), *rest, **named, **options)
        mean = _mean_in(output)
        if not isinstance(mean, Tensor):
            raise _NoLoss(output)
        loss = mean_loss(mean, self._units_of(output, batch))
        self._output = dict(output) if isinstance(output, Mapping) else {}
        extras = {f"output {k}": v for k, v in self._output.items() if k not in ("loss", "units")}
        if not is_traced:
            extras = {name: v for name, v in extras.items() if isinstance(v, Tensor)}
        return Loss(loss.total, loss.units, extras={"loss": mean, **logged, **extras})

    def _log_into(self, logged: dict[str, Tensor], is_traced: bool) -> Callable[..., None]:
        """Return a log that keeps tensors to be logged again; a graph cannot log anything else."""
        plain = self._module.log

        def log(key: str, value: Any, **options: Any) -> None:
            if isinstance(value, Tensor):
                place = f"{len(logged)} {key}"
                logged[place], self._logged[place] = value.detach(), (key, options)
            elif is_traced:
                raise UnsupportedError(f"training_step logs {key!r}, which is not a tensor")
            if not is_traced:
                plain(key, value, **options)

        return log


class _NoLoss(Exception):
    """A training_step has returned no loss: Lightning skips the batch."""

    def __init__(self, output: Any) -> None:
        super().__init__("no loss")
        self.output = output


def _unread(value: Any) -> Any:
    return Unread(value) if type(value) is int else value


class Unread(int):
    """A number that the code of a graph must not read: it differs from call to call."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError("training_step reads batch_idx, which differs from call to call")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = _refuse
    __floordiv__ = __truediv__ = __neg__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __format__ = _refuse
    __hash__ = _refuse


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
    _check_strategy(trainer.strategy)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in a step; a window's gradient is made "
                "once, so use an optimizer whose step needs no closure"
            )


def _mean_in(output: Any) -> Any:
    """Return the mean loss of what a training_step returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _log_nothing(*_: Any, **__: Any) -> None:
    """Stands for a module's log."""
