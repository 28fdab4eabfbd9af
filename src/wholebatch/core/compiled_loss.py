"""Loss functions of a loop of the user's own, run as one graph: forward, backward and addition.

`compile` of an Accumulator, and of the adapters for other libraries, returns a `CompiledLoss`. A
call makes the whole micro-step, because the seed of the window is known by then, and returns an
`AddedLoss`. `backward` of the same window only enters that one. Until it does, the window refuses
everything else, so that no gradient is in it without its units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile import Execute, Executor, check_execute
from wholebatch.compile.captured_state import FUNCTIONS, reached
from wholebatch.core.forward_state import replaced_attributes
from wholebatch.core.loss import SINGLE, Loss, Units, as_loss
from wholebatch.core.precision import Full
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError

if TYPE_CHECKING:
    from wholebatch.core.stream import Stream
    from wholebatch.core.window import Window


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
        *,
        door: Stream,
        window: Window,
        execute: Execute,
        keeps_moments: bool,
        reads: Callable[..., Any] | None = None,
    ) -> None:
        if not callable(loss):
            raise OptionError(f"compile({loss!r}): must be a function that returns a wb.Loss")
        functools.update_wrapper(self, loss, updated=())
        models, device = window.target.models, window.target.device
        self._loss, self._door, self._window, self._device = loss, door, window, device
        self._given: Any = None
        self._call = _on_micro_batch(loss, models, reads or loss)
        self._modules = _all_modules(models, reads or loss)
        self.executor = Executor(
            execute_here(check_execute(execute, device)),
            model=self._modules,
            loss=self._call,
            window=window,
            precision=Full(),
            device=device,
            eager=self._eager_step,
            single=SINGLE,
            keeps_moments=keeps_moments,
            adds=door.adds,
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
        self._given = micro
        try:
            with (
                self._door.micro_step(self._modules) as may_compile,
                torch.autocast(kind, enabled=False) if is_on else nullcontext(),
            ):
                added = self._added(micro, may_compile)
        finally:
            self._given = None
        self._door.pending.loss = added
        return added

    def _added(self, micro: Any, may_compile: bool) -> AddedLoss:
        if not may_compile:
            self._door.look_at_function(self._modules, self._call, micro)
            loss = self._eager_step(micro, self._call)
            extras = {name: extra.detach() for name, extra in loss.extras.items()}
            return AddedLoss(loss.total.detach(), loss.units, extras, self._door)
        entered = len(self._window.now.owners)
        try:
            made = self.executor.micro_step(micro)
        except BaseException:
            if len(self._window.now.owners) != entered or self.executor.mode != "eager":
                self._door.mark_broken()
            raise
        return AddedLoss(made.totals[SINGLE], made.units[SINGLE], made.extras, self._door)

    def _eager_step(self, _: Any, function: Callable[[Any, Any], Any]) -> Loss:
        """Run the micro-step on the arguments as they were given: some may belong on the host."""
        loss = as_loss(function(None, self._given))
        self._door.add_eagerly(loss)  # a stream refuses a loss of several terms
        assert isinstance(loss, Loss)
        return loss


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
