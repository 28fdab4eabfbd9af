"""Windows in a loop whose forwards are not ours: what `Accumulator` and the adapters share.

Such a loop gives its losses one by one. So BatchNorm cannot be exact, what cannot be the update of
the whole batch is checked for in the first window, and nobody else may write the open window.

`compile` turns a loss function of the loop into a `CompiledLoss`. A call of it makes the whole
micro-step as one graph (forward, backward and addition), because the seed of the window is known by
then, and returns an `AddedLoss`. `backward` of the same window only enters that one. Until it does,
the window refuses everything else, so that no gradient is in it without its units.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile import Execute, check_execute
from wholebatch.compile.captured_state import FUNCTIONS, reached
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.additivity import AdditivityTest, WindowData
from wholebatch.coupled.audit import warn_of_spectral_norms
from wholebatch.coupled.batchnorm.policies import Refuse
from wholebatch.coupled.loop_checks import LoopChecks
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError
from wholebatch.losses.loss import (
    SINGLE,
    Loss,
    Terms,
    Units,
    as_loss,
    check_units,
    is_known_to_be_zero,
    mean_loss,
    refuse_in_parts,
    refuse_lost_mean,
)
from wholebatch.window.close import check_terms
from wholebatch.window.foreign_writes import Untouched
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.precision import Full, Precision, choose
from wholebatch.window.window import HasWindow, Step, Window

_log = logging.getLogger("wholebatch")


@dataclass(frozen=True)
class GivenLoss:
    """The loss of one micro-batch as a loop gives it: a sum or a mean over its units.

    >>> weight = torch.ones((), requires_grad=True)
    >>> GivenLoss.of(weight * 6, units=3).summed.item()
    6.0
    >>> GivenLoss.of(mean=weight * 2, units=3).summed.item()
    6.0
    """

    loss: Tensor
    units: Units
    is_mean: bool = False
    whole: Loss | None = None
    """The `wb.Loss` that it was given as, if it was."""

    @classmethod
    def of(
        cls,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        mean: Tensor | None = None,
    ) -> GivenLoss:
        """Return the loss that `backward(total, units=)` or `backward(mean=, units=)` was given."""
        if mean is not None and total is not None:
            raise LossError(
                "backward() with both of total and mean=: total is the sum over the units and mean "
                "is the mean over them; give one of the two"
            )
        if isinstance(total, Loss):
            if units is not None:
                raise LossError("units= beside a wb.Loss, which carries its own: give one")
            return cls(total.total, total.units, whole=total)
        if isinstance(total, Terms):
            check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
        loss = total if mean is None else mean
        if loss is None:
            raise LossError(
                "backward() without a loss: give total, the sum over its units, or mean=, the mean "
                "over them, with units="
            )
        if units is None:
            raise LossError(
                "backward(mean=...) without units=: say what it is the mean over (units=samples, "
                "tokens or weights)"
                if mean is not None
                else "backward(total) without units=: total is a sum; say what it is a sum over "
                "(units=samples, tokens or weights), or say that it is a mean: "
                "backward(mean=..., units=), or pass wb.Loss / wb.mean_loss(mean, units)"
            )
        given = cls(cast("Tensor", loss), check_units(units), mean is not None)
        if mean is not None and is_known_to_be_zero(given.units) and isinstance(mean, Tensor):
            refuse_lost_mean(mean)
        return given

    def check(self, checks: LoopChecks, *, in_parts: bool, steps: int = 0) -> None:
        """Refuse a loss with one of the mistakes that a loop is tested for.

        `steps` is the number of micro-batches of the window, if it is known.
        """
        if self.is_mean:
            checks.check(mean=self.loss, units=self.units, in_parts=in_parts, steps=steps)
        else:
            checks.check(self.whole or self.loss, self.units, in_parts=in_parts, steps=steps)

    @property
    def summed(self) -> Tensor:
        """The sum, with its graph."""
        return mean_loss(self.loss, self.units).total if self.is_mean else self.loss


class Stream(HasWindow):
    """The base of objects with windows that a loop fills."""

    by: ClassVar[str] = "the loop"
    """Who writes what an open window must be left alone with."""

    def __init__(self, window: Window, *, batchnorm: str, audit: bool) -> None:
        target = window.target
        self._window = window
        self._untouched = Untouched(window, self.by)
        self._batchnorms = [choose_batchnorm(batchnorm, model) for model in target.models]
        for model in target.models:
            warn_of_spectral_norms(model)
        self._refusing = [one for one in self._batchnorms if isinstance(one, Refuse) and one.norms]
        self._checks = LoopChecks(target.models, audit=audit)
        self.audits = audit
        self.pending = Pending()
        self._counts = True  # False while a micro-batch only takes part in others' collectives

    def __del__(self) -> None:
        window = getattr(getattr(self, "_window", None), "open", None)
        failed = hasattr(sys, "last_type")  # the program ends by an error, which says enough
        if window is not None and window.micro_batches and not failed:
            _log.warning(
                "%s is gone with an open window: its %d micro-batches have made no update. Close "
                "the short last window: flush(), or over(loader), which knows the end (with "
                "Accelerate: prepare the loader)",
                type(self).__name__,
                window.micro_batches,
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._window.now.micro_batches

    @overload
    def compile(
        self,
        loss: Callable[..., Any],
        *,
        execute: Execute = "auto",
        precision: Literal["fp8"] | None = None,
    ) -> CompiledLoss: ...

    @overload
    def compile(
        self,
        loss: None = None,
        *,
        execute: Execute = "auto",
        precision: Literal["fp8"] | None = None,
    ) -> Callable[[Callable[..., Any]], CompiledLoss]: ...

    def compile(
        self,
        loss: Callable[..., Any] | None = None,
        *,
        execute: Execute = "auto",
        precision: Literal["fp8"] | None = None,
    ) -> CompiledLoss | Callable[[Callable[..., Any]], CompiledLoss]:
        """Return the loss function as one that runs at the speed of `WholeBatch`.

        ```python
        @acc.compile
        def loss(micro):
            logits = model(micro["x"])
            return wb.cross_entropy(logits, micro["y"])

        for micro in acc.over(loader):
            acc.backward(loss(micro))
        ```

        The function returns a `wb.Loss` (or a tensor of per-unit losses). A call runs forward,
        backward and addition as one graph, where that is possible, and by eager code where it is
        not. `backward` then only enters the loss. Tensors to look at (an accuracy) go into
        `wb.Loss(total, units, extras={...})`, and come back in `loss.extras`.

        The function computes as your loop does, under the autocast it is called with.
        `precision="fp8"` is bf16 autocast with 8-bit linear layers, as in `WholeBatch`.
        """
        if loss is None:
            return functools.partial(self.compile, execute=execute, precision=precision)
        return self.compiled(loss, execute, precision=precision)

    def compiled(
        self,
        loss: Callable[..., Any],
        execute: Execute,
        reads: Callable[..., Any] | None = None,
        precision: str | None = None,
    ) -> CompiledLoss:
        """Return a compiled loss function of these windows (`reads`: see `CompiledLoss`)."""
        return CompiledLoss(loss, self, execute, reads, precision)

    @contextmanager
    def micro_step(self, modules: nn.Module) -> Iterator[None]:
        """Return the context of a compiled function's micro-step.

        `modules` holds all modules that the function uses.
        """
        self.pending.refuse()
        if self._window.open is not None:
            self._window.open.refuse_broken()
        self._untouched.check()
        yield
        self._untouched.remember()

    def _add_eagerly(self, loss: Loss | Terms) -> None:
        """Make the backward of a compiled function's loss; refuse several terms.

        Another backward may follow, so that the close reduces.
        """
        if self._in_parts and self.audits:
            refuse_in_parts(loss)
        self._window.add_loss(loss, counts=self._counts)

    @property
    def _in_parts(self) -> bool:
        """True if this micro-batch is not the whole global batch."""
        return True

    @property
    def _planned_steps(self) -> int:
        """The number of micro-batches of the window; 0 if it is not known before its end."""
        return 0

    def _mark_broken(self) -> None:
        """Let the window be discarded: some gradients of a micro-batch are in, others are not."""
        if self._window.open is not None:
            self._window.open.broken = True

    def discard(self) -> None:
        """Drop what the window holds; the next micro-batch begins a new one."""
        self._window.discard()
        self._untouched.forget()
        self.pending.loss = None
        self._checks.end_micro_batch()

    def _close_window(self, **how: Any) -> Step:
        """Close the window."""
        self._untouched.forget()
        return self._window.close(**how)


# ------------------------------------------------------------- compiled loss functions

_HAS_GRAPHS = hasattr(torch.nn.Parameter, "grad_dtype")  # since torch 2.11


def execute_here(execute: Any) -> Any:
    """Return the way to run a micro-step: eager code where torch is too old for graphs."""
    if _HAS_GRAPHS or execute == "eager":
        return execute
    if execute == "auto":
        return "eager"
    raise UnsupportedError(
        f'execute="{execute}" with torch {torch.__version__}: compiled and recorded graphs need '
        'torch 2.11 or newer; use execute="eager", or "auto"'
    )


@dataclass(eq=False, repr=False)
class AddedLoss:
    """The loss of a micro-batch whose gradient is in the window already.

    Give it to `backward` of that window. It can be read (`loss.mean`, `float(loss)`, `loss.total`,
    `loss.extras["accuracy"]`), but not computed with: its backward is made.
    """

    total: Tensor
    units: Units
    extras: Mapping[str, Tensor]
    owner: object
    """The window that has its gradient."""

    @property
    def mean(self) -> Tensor:
        """The mean over the units, on the device; 0 where there are none."""
        total = self.total
        units = torch.as_tensor(self.units, device=total.device, dtype=total.dtype)
        return total / units.clamp(min=torch.finfo(total.dtype).tiny)

    def detach(self) -> Tensor:
        """Return the mean, to log it."""
        return self.mean

    def item(self) -> float:
        return float(self.mean)

    __float__ = item

    def __repr__(self) -> str:
        return f"AddedLoss(total={self.total!r}, units={self.units!r})"

    def _refuse(self, *_: object) -> NoReturn:
        raise LossError(
            "a compiled loss function has made the backward of its loss already, so that nothing "
            "can be computed with it: do that inside the function, and give the loss to backward() "
            "as it is (loss.mean and loss.total are for logging)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = _refuse
    backward = sum = _refuse


class Pending:
    """The loss of a compiled function that a window waits for, if any."""

    loss: AddedLoss | None = None

    def take(self, loss: AddedLoss, owner: object) -> None:
        """Take the loss that was given to backward; refuse any but the one that is waited for."""
        if loss.owner is not owner:
            raise WindowError(
                "this loss was made by the compiled function of another window, which has its "
                "gradient: give it to backward() of the object whose compile() made the function"
            )
        if loss is not self.loss:
            raise WindowError(
                "this loss was given to backward() before, or its window was discarded: each call "
                "of a compiled loss function needs one backward()"
            )
        self.loss = None

    def refuse(self) -> None:
        """Refuse to go on with a window that has a gradient without its units."""
        if self.loss is not None:
            raise WindowError(
                "a compiled loss function has added the gradient of a micro-batch, and its loss "
                "was not given to backward(): call backward(loss) once after every call of the "
                "function; discard() drops what the window holds. To evaluate without training, "
                "call the function under torch.no_grad()"
            )


class CompiledLoss:
    """A loss function that adds the gradient of its micro-batch when it is called.

    Under `torch.no_grad()` it is the function as it was written. `reads` is the user's own code
    inside `loss`, if that is not the user's: changes of what it reads are looked for.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        door: Stream,
        execute: Execute,
        reads: Callable[..., Any] | None,
        precision: str | None,
    ) -> None:
        if not callable(loss):
            raise OptionError(f"compile({loss!r}): must be a function that returns a wb.Loss")
        functools.update_wrapper(self, loss, updated=())
        window = door._window
        models, device = window.target.models, window.target.device
        self._loss, self._door, self._window, self._device = loss, door, window, device
        self._precision = _precision_of(precision, window)
        self._given: Any = None
        door._checks.stop()  # The function itself is tested, and hooks on models stop a graph.
        self._call = _on_micro_batch(loss, models, reads or loss)
        self._modules = _all_modules(models, reads or loss)
        sync = window.sync
        shares = sync.counts_must_agree or sync.grows_own_graph
        # Ranks may have different numbers of micro-batches, so each tests alone.
        self._test = AdditivityTest(
            self._modules, None, enabled=door.audits, shares_forwards=shares, loss=self._call
        )
        from wholebatch.compile.micro_step import Executor  # Not needed to import wholebatch.

        self.executor = Executor(
            execute_here(check_execute(execute, device)),
            model=self._modules,
            loss=self._call,
            window=window,
            precision=self._precision,
            device=device,
            eager=self._eager_step,
            single=SINGLE,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch, whose gradient is then in the window."""
        if not torch.is_grad_enabled():
            return self._loss(*args, **kwargs)
        kind = self._device.type
        is_on = torch.is_autocast_enabled(kind)
        micro = {
            "args": args,
            "kwargs": kwargs,
            "autocast": torch.get_autocast_dtype(kind) if is_on else None,
        }
        if self._precision.name == "fp8" and micro["autocast"] not in (None, torch.bfloat16):
            raise OptionError(
                f"compile(..., precision='fp8') called under autocast to {micro['autocast']}: fp8 "
                "computes the rest in bf16; use bf16 autocast or none, and no GradScaler"
            )
        self._given = micro
        try:
            with (
                self._door.micro_step(self._modules),
                torch.autocast(kind, enabled=False) if is_on else nullcontext(),
            ):
                added = self._added(micro)
        finally:
            self._given = None
        self._door.pending.loss = added
        return added

    def _added(self, micro: Any) -> AddedLoss:
        self._test_window(micro)
        entered = len(self._window.now.owners)
        try:
            made = self.executor.micro_step(micro)
        except BaseException:
            if len(self._window.now.owners) != entered or self.executor.mode != "eager":
                self._door._mark_broken()
            raise
        return AddedLoss(made.totals[SINGLE], made.units[SINGLE], made.extras, self._door)

    def _test_window(self, micro: Any) -> None:
        """Refuse a loss that does not add up, at the start of windows 1, 2, 4, 8, ..."""
        door = self._door
        if self._window.now.owners or not door._in_parts or not self._test.begin_window():
            return
        # By name, since a tuple of two arguments could be read as a list of two samples.
        arguments = {str(place): value for place, value in enumerate(micro["args"])}
        given = {"args": arguments, "kwargs": micro["kwargs"]}

        def run(few: Any) -> Any:
            few_arguments = tuple(few["args"].values())
            return self._call(None, {**micro, "args": few_arguments, "kwargs": few["kwargs"]})

        with self._precision.look():
            self._test.test(run, WindowData(given, [given], steps=[door._planned_steps]))

    def _eager_step(self, _: Any, function: Callable[[Any, Any], Any]) -> Loss:
        """Run the micro-step on the arguments as they were given: some may belong on the host."""
        with self._precision.window():
            with self._precision.forward():
                loss = as_loss(function(None, self._given))
            self._door._add_eagerly(loss)  # a stream refuses a loss of several terms
        assert isinstance(loss, Loss)
        return loss


def _precision_of(precision: str | None, window: Window) -> Precision:
    """Return the precision of a compiled loss function: the loop's own, or fp8."""
    if precision is None:
        return Full()
    if precision != "fp8":
        raise OptionError(
            f"compile(..., precision={precision!r}): must be 'fp8', or None for the precision of "
            "your loop (torch.autocast around the call, or what your trainer sets)"
        )
    target = window.target
    keeps = not window.sync.grows_own_graph
    return choose(precision, target.device.type, keeps=keeps, models=target.models)


def _on_micro_batch(
    loss: Callable[..., Any], models: Sequence[nn.Module], reads: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function as one of `(model, micro)`, under the autocast it was called with."""
    kind = next(models[0].parameters()).device.type
    replicas = [
        m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)
    ]

    def call(_: Any, micro: Any, reads: Any = reads) -> Any:
        dtype = micro["autocast"]
        with ExitStack() as stack:
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if replicas and torch._C._len_torch_dispatch_stack():  # it is being traced
                for one in replicas:  # call the module inside of DDP directly
                    stack.enter_context(replaced_attributes(one, forward=one.module))
            return loss(*micro["args"], **micro["kwargs"])

    # What the user's function reads is looked at for changes; our own functions are not.
    call.__module__ = getattr(reads, "__module__", None) or "__main__"
    return call


def _all_modules(models: Sequence[nn.Module], loss: Any) -> nn.Module:
    """Return one module with all models, and with those that only the loss function knows.

    Those are what the function reaches, by itself or by the functions that it names: a GAN's
    generator is trained through a judge that another window trains.
    """
    inner = [m.module if isinstance(m, DistributedDataParallel) else m for m in models]
    known = {module for model in inner for module in model.modules()}
    more = []
    values = [value for _, value in reached(loss)]
    values += [v for one in values if isinstance(one, FUNCTIONS) for _, v in reached(one)]
    for module in values:
        if isinstance(module, nn.Module) and known.isdisjoint(module.modules()):
            more.append(module)
            known.update(module.modules())
    return inner[0] if len(inner) == 1 and not more else nn.ModuleList([*inner, *more])
