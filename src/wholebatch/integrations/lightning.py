"""Exact gradient accumulation in Lightning's Trainer and in loops over Fabric.

```python
trainer = Trainer(
    accumulate_grad_batches=4,
    gradient_clip_val=1.0,
    callbacks=[ExactAccumulation(units=lambda batch: (batch["labels"] != -100).sum())],
)
```

In a loop over Fabric, `FabricAccumulator.backward` takes the place of `fabric.backward`;
`FabricAccumulator.run` takes the loss function, and runs the micro-batch as one graph.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from wholebatch.audit.own_loop import OF_A_LOSS, OwnLoop
from wholebatch.compile import Execute
from wholebatch.errors import LossError, OptionError, StateError, UnsupportedError
from wholebatch.integrations.handed_over import HandedOver, handed_over_close
from wholebatch.losses.loss import Loss, Units, mean_loss
from wholebatch.optional_packages import require
from wholebatch.options import Close, close_options
from wholebatch.warn_user import warn_user
from wholebatch.window.replaced_attributes import replaced_attributes
from wholebatch.window.window import Step

require("lightning", at_least="2.4", extra="lightning", purpose="wholebatch in Lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric import wrappers as fabric_wrappers  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

__all__ = ["ExactAccumulation", "FabricAccumulator"]

_log = logging.getLogger("wholebatch")

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if name == "FSDPStrategy":
        raise UnsupportedError(
            "Lightning's FSDPStrategy (FSDP1), which reduces gradients by its own rules: use "
            "ModelParallelStrategy, which is FSDP2"
        )
    if name not in _STRATEGIES or getattr(strategy, "handles_gradient_accumulation", False):
        raise UnsupportedError(
            f"Lightning's {name}: not tested to make the update of the undivided batch; supported "
            f"are {', '.join(_STRATEGIES)}"
        )
    if getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto"):
        raise UnsupportedError(
            "Lightning's ModelParallelStrategy with tensor parallelism: units would be counted "
            "more than once over ranks that share a batch; use data parallelism alone"
        )


class FabricAccumulator(HandedOver):
    """Exact gradient accumulation for a loop over Fabric.

    ```python
    windows = FabricAccumulator(fabric, model, optimizer)
    for index, batch in enumerate(loader):
        last = (index + 1) % steps == 0 or index + 1 == len(loader)
        loss = F.cross_entropy(model(batch["x"]), batch["y"])           # the mean
        windows.backward(mean=loss, units=len(batch["y"]), last=last)   # was fabric.backward
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    ```

    `backward(total, units=...)` takes a sum, `backward(mean=..., units=...)` a mean. Both may be a
    `wb.Loss` instead. `last=True` completes the window: the gradients are then those of the whole
    batch on all ranks, and Fabric's clipping, loss scale and step work on them. A loss or gradient
    that is not finite raises `NonFiniteError`, and no gradient is left; with
    `close=wb.Close(nonfinite="skip")` the loop's step then changes nothing.
    """

    closes_by = "pass last=True to the backward of its last micro-batch"
    _knows_steps = False

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        execute: Execute = "auto",
        batchnorm: str = "refuse",
        close: Close | None = None,
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
        wrapped: Any = model
        super().__init__(
            wrapped._forward_module,  # what Fabric's strategy wraps the module in
            [inner],
            steps=2,  # more than one: backward(last=) says how many
            scaled_by=fabric.strategy.precision,
            execute=execute,
            batchnorm=batchnorm,
            close=close,
            audit=audit,
        )

    if not TYPE_CHECKING:  # a type checker takes the overloads of Accumulator

        def backward(self, *args: Any, **options: Any) -> Step | None:
            """Run the backward of one micro-batch's loss; `last=True` completes the window."""
            with _in_fabric_backward():
                return super().backward(*args, **options)

        def run(self, *args: Any, **options: Any) -> Step | None:
            """Run one micro-batch by its loss function; `last=True` completes the window."""
            with _in_fabric_backward():
                return super().run(*args, **options)

    def _last_of(self, last: bool | None) -> bool | None:
        if last is None:
            raise OptionError(
                "backward() or run() without last=: pass last=True for the last micro-batch of a "
                "window, after which the loop steps, and last=False for the others"
            )
        return last


def _in_fabric_backward() -> AbstractContextManager[None]:
    """Let backwards pass that are not made by fabric.backward, whose loss scale a seed has."""
    return replaced_attributes(fabric_wrappers, _in_fabric_backward=True)


class ExactAccumulation(Callback):
    """A callback for exact gradient accumulation in Lightning's automatic optimization.

    `training_step` still returns its mean loss. `units(batch)` returns the number of samples,
    tokens or weights that it is a mean over (a number or a 0-dim tensor). Without `units`,
    `training_step` returns a dict with "loss" and "units". Before the Trainer clips and steps, the
    gradients are those of the whole window on all ranks. This includes short last windows,
    `GradientAccumulationScheduler` and every precision plugin. `last` is the `wb.Step` of the last
    complete window, with its exact mean `loss` and its `units`.

    A loss or gradient that is not finite raises `NonFiniteError` before the step, and no gradient
    is left; with `close=wb.Close(nonfinite="skip")` such a window makes no update, but
    schedulers still step. With fp16, Lightning's loss scaler skips such updates.

    On a GPU, `training_step`, its backward and the addition run as one graph (`execute="auto"`) if
    the step logs only tensors and does not use `batch_idx`.
    """

    def __init__(
        self,
        units: Callable[[Any], Units] | None = None,
        *,
        execute: Execute = "auto",
        batchnorm: str = "refuse",
        close: Close | None = None,
        audit: bool = True,
    ) -> None:
        if units is not None and not callable(units):
            raise OptionError(
                f"units={units!r}: must be a function of the batch, or None where training_step "
                'returns {"loss": ..., "units": ...}'
            )
        close_options(handed_over_close(close), None).check(())
        self._units = units
        self._options: dict[str, Any] = {
            "execute": execute,
            "batchnorm": batchnorm,
            "close": close,
            "audit": audit,
        }
        self._windows: TrainerAccumulator | None = None
        self._step: TrainingStep | None = None
        self._saved_updates = 0
        self._replaced = ExitStack()

    @property
    def last(self) -> Step | None:
        """The Step of the last complete window; None before the first, or if it made no update."""
        step = None if self._windows is None else self._windows.last_step
        return None if step is None or step.skipped is not None else step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)
        _warn_of_repeats(trainer)
        self._windows = TrainerAccumulator(trainer, **self._options)
        self._windows._ledger.count_from(self._saved_updates)
        self._step = step = TrainingStep(trainer, pl_module, self._windows, self._units_of)
        self._replaced.enter_context(
            replaced_attributes(
                pl_module,
                training_step=step.training_step,
                backward=step.backward,
                optimizer_step=step.optimizer_step,
                optimizer_zero_grad=step.optimizer_zero_grad,
            )
        )

    def _units_of(self, output: Any, batch: Any) -> Units:
        if self._units is not None:
            return self._units(batch)
        if isinstance(output, Mapping) and "units" in output:
            units: Units = output["units"]
            return units
        raise LossError(
            "wholebatch does not know what the loss is a mean over: pass "
            'ExactAccumulation(units=a function of the batch), or return {"loss": ..., "units": '
            "...} from training_step"
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop what is left of a window where Lightning is about to clear the gradients."""
        first = batch_idx % trainer.accumulate_grad_batches == 0
        if first and self._windows is not None and self._windows.is_open:
            self._windows.discard()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Close a window whose last training_step returned no loss."""
        if self._windows is not None and self._windows.is_open:
            self._windows.flush()

    def on_train_end(self, *_: Any) -> None:
        """Leave the module as it was found."""
        if self._windows is not None:
            self._windows.detach()
        self._replaced.close()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates; warn of an open window, whose gradient is not saved."""
        windows = self._windows
        if windows is None:
            return {"updates": self._saved_updates, "open": 0}
        open_ = windows.micro_batches if windows.is_open else 0
        if open_:
            _log.warning(
                "a checkpoint in the middle of a window does not hold the gradient of its %d "
                "micro-batches: ExactAccumulation will refuse to resume from it",
                open_,
            )
        return {"updates": windows.updates, "open": open_}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["open"]:
            raise StateError(
                f"the checkpoint was saved when {state_dict['open']} micro-batches of a window "
                "were done, and does not hold their gradients: resume from a checkpoint that was "
                "saved after an update (every_n_train_steps of ModelCheckpoint counts updates)"
            )
        self._saved_updates = state_dict["updates"]


class TrainerAccumulator(HandedOver):
    """The windows of a Lightning Trainer. Its optimizers step around the last training_step."""

    guards_steps = False

    def __init__(self, trainer: Trainer, *, execute: Execute, **options: Any) -> None:
        model: Any = trainer.strategy.model
        super().__init__(
            model,
            trainer.optimizers,
            steps=lambda _: trainer.accumulate_grad_batches,  # a scheduler may change it
            scaled_by=trainer.precision_plugin,
            execute="eager" if trainer.world_size > 1 else execute,
            **options,
        )
        self._trainer = trainer
        if options.get("audit", True):  # `run` tests the whole training_step
            self._ledger.observer = OwnLoop(self._ledger.target, OF_A_LOSS)

    @property
    def is_open(self) -> bool:
        """True if the window holds a micro-batch."""
        return self._ledger.open is not None


class TrainingStep:
    """A module's training_step, which makes its backward too, and the methods around it.

    A graph runs no Python, so what training_step logs is logged again after every call.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        windows: TrainerAccumulator,
        units_of: Callable[[Any, Any], Units],
    ) -> None:
        self._trainer, self._module, self._windows = trainer, module, windows
        self._units_of = units_of
        self._inner: Callable[..., Any] = module.training_step
        self._clear, self._inner_step = module.optimizer_zero_grad, module.optimizer_step
        self._is_last = False
        self._rest: tuple[Any, ...] = ()  # what training_step is given beside the batch
        self._logged: dict[str, tuple[str, dict[str, Any]]] = {}  # by the name of the extra
        self._batch: Any = None  # of the call under way; tests run parts of it
        self._ran = False  # True if this call has run the code itself, with its log
        self._output: dict[str, Any] = {}  # of the code itself
        run_loss = windows._functions.prepare(self._run, reads=self._inner)
        self.executor = run_loss.executor
        self._as_run = run_loss.as_read
        self._unread: tuple[Any, ...] = ()  # `rest` where training_step is captured
        self._recorded: dict[str, Tensor] | None = None  # what it logs there
        self._recorders = {"log": self._record, "log_dict": self._record_all}
        self.executor.guard(lambda _, micro: self._captured(micro["micro"]), self._as_read)

        @functools.wraps(self._inner)  # Lightning reads its signature
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if trainer.training and torch.is_grad_enabled():
                return self._training_step(*args)
            return self._inner(*args, **kwargs)  # called in a validation_step

        self.training_step = training_step

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        """Run training_step and its backward; return its output."""
        trainer, windows = self._trainer, self._windows
        if not windows.is_open:
            for optimizer in trainer.optimizers:  # Lightning would do it too late
                self._clear(trainer.current_epoch, trainer.global_step, optimizer)
        self._ran, self._batch, self._rest = False, batch, rest
        self._unread = tuple(_INDEX if type(value) is int else value for value in rest)
        try:
            windows.run(self._run, batch, last=self._is_last)
        except _NoLoss as skipped:
            return skipped.output
        finally:
            self._batch = None
        last = windows.last_loss
        assert isinstance(last, Loss)
        extras = dict(last.extras)
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

    def backward(self, *_: Any, **__: Any) -> None:
        """Do nothing: training_step has made the backward."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Run the module's own optimizer_step, around the window's last training_step."""
        self._is_last = True
        try:
            self._inner_step(*args, **kwargs)
        finally:
            self._is_last = False

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing: training_step has cleared the gradients before its window."""

    def _run(self, batch: Any) -> Loss:
        """Run training_step on a batch, and return its loss with everything that it logs."""
        is_step = batch is self._batch  # not a test of parts
        self._ran |= is_step
        logged: dict[str, Tensor] = {}
        log = self._log_into(logged, is_step)

        def log_dict(values: Mapping[str, Any], **options: Any) -> None:
            for key, value in values.items():
                log(key, value, **options)

        with replaced_attributes(self._module, log=log, log_dict=log_dict):
            output = self._inner(batch, *self._rest)
        if is_step:
            self._output = dict(output) if isinstance(output, Mapping) else {}
        return self._loss_of(output, batch, logged)

    def _loss_of(self, output: Any, batch: Any, logged: Mapping[str, Tensor]) -> Loss:
        """Return what training_step returned, with everything that it logged, as a Loss."""
        others = dict(output) if isinstance(output, Mapping) else {}
        mean = others.get("loss") if others else output
        if not isinstance(mean, Tensor):
            raise _NoLoss(output)
        loss = mean_loss(mean, self._units_of(output, batch))
        names = [
            k for k, v in others.items() if k not in ("loss", "units") and isinstance(v, Tensor)
        ]
        extras = {f"output {name}": others[name] for name in names}
        return Loss(loss.total, loss.units, extras={"loss": mean, **logged, **extras})

    def _captured(self, batch: Any) -> Loss:
        """Run training_step where it is captured for a graph; its logs go into `_recorded`."""
        self._recorded = {}
        output = self._inner(batch, *self._unread)
        logged, self._recorded = self._recorded, None
        return self._loss_of(output, batch, logged)

    def _record(self, key: str, value: Any, **_: Any) -> None:
        assert self._recorded is not None
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"training_step logs {key!r}, which is not a tensor")
        self._recorded[f"{len(self._recorded)} {key}"] = value.detach()

    def _record_all(self, values: Mapping[str, Any], **options: Any) -> None:
        for key, value in values.items():
            self._record(key, value, **options)

    @contextmanager
    def _as_read(self) -> Iterator[None]:
        """Be in the state in which training_step is captured."""
        with self._as_run(), replaced_attributes(self._module, **self._recorders):
            yield

    def _log_into(self, logged: dict[str, Tensor], is_step: bool) -> Callable[..., None]:
        """Return a log that keeps tensors to be logged again."""
        plain = self._module.log

        def log(key: str, value: Any, **options: Any) -> None:
            if isinstance(value, Tensor):
                place = f"{len(logged)} {key}"
                logged[place], self._logged[place] = value.detach(), (key, options)
            if is_step:
                plain(key, value, **options)

        return log


class _NoLoss(Exception):
    """A training_step has returned no loss: Lightning skips the batch (several ranks: refuses)."""

    def __init__(self, output: Any) -> None:
        super().__init__("no loss")
        self.output = output


class UnusableIndex:
    """Stands for batch_idx where training_step is captured for a graph.

    A number would become a constant. This is no `int`: arithmetic, comparisons by size and indexing
    raise a TypeError by themselves.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError("training_step uses batch_idx, which differs from call to call")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _refuse


_INDEX = UnusableIndex()


def _warn_of_repeats(trainer: Trainer) -> None:
    """Warn of samples that a DistributedSampler repeats to make the ranks equal."""
    sampler = getattr(trainer.train_dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if repeated:
        warn_user(
            f"DistributedSampler repeats {repeated} samples in each epoch to make the ranks equal, "
            "and they count twice in a window: pass Trainer(use_distributed_sampler=False) and a "
            "DataLoader(sampler=DistributedSampler(data, drop_last=True))"
        )


def _check(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} uses manual optimization: use FabricAccumulator or "
            "wb.over in a loop of your own, or automatic optimization"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            f"{type(module).__name__}.training_step takes dataloader_iter: Lightning then clears "
            "the gradients one micro-batch late; take (batch, batch_idx)"
        )
    if type(module).backward is not LightningModule.backward:
        raise UnsupportedError(
            f"{type(module).__name__} overrides backward(), and ExactAccumulation runs the "
            "backward pass itself: scale the loss in training_step instead, or use "
            "FabricAccumulator in a loop of your own"
        )
    _check_strategy(trainer.strategy)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times in a step; a window's gradient is made "
                "once, so use an optimizer whose step needs no closure"
            )
