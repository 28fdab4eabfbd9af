"""Windows in a loop that is somebody else's.

A trainer of another library makes the forwards, the backwards and the step, and clips and logs in
between. What is left to us is the scale. A hook on the loss multiplies the gradient that enters the
graph by one seed for the window and all ranks (times the units, where the loss is a mean), so that
after the last backward the gradients are

    seed / (host's divisors) × sum over micro-batches and ranks of d(total)

and the close multiplies them by the one number that makes this the gradient of the undivided global
batch. Whatever the trainer does with gradients comes after that and sees the right ones. The window
and its laws are those of `window/window.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch.samples import readable_layout
from wholebatch.coupled.audit import LossLook
from wholebatch.distributed import Sync
from wholebatch.distributed.choose_engine import warn_alone
from wholebatch.distributed.ddp import Buckets
from wholebatch.distributed.fsdp import check_dtypes
from wholebatch.distributed.process_group import Group, world_size
from wholebatch.distributed.sync_strategy import Context, Parameters
from wholebatch.distributed.tensor_parallel import norm_over_meshes
from wholebatch.errors import LossError, OptionError, StateError, UnsupportedError, WindowError
from wholebatch.losses.loss import SINGLE, Loss, Terms, check_total
from wholebatch.stream import AddedLoss, GivenLoss, Stream
from wholebatch.window.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    Policy,
    close_gradients,
    dense_gradients,
)
from wholebatch.window.forward_state import attributes_restored
from wholebatch.window.gradient_store import DeviceStore, Store
from wholebatch.window.model_and_optimizer import Target, stand_in
from wholebatch.window.precision import SIXTEEN_BIT, LossScale, SixteenBit
from wholebatch.window.window import OpenWindow, Window

GradientsIn: TypeAlias = Literal["whole", "sharded", "elsewhere"]
"""Where a host's engine keeps gradients between two backwards of a window: whole ones in `.grad`;
in the engine until the last backward leaves slices in `.grad` (FSDP); nowhere that we see."""

_completed: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers of windows that were completed, and that have made no step since."""


class HostEngine(Sync):
    """An engine whose reduction is the host's: its last backward of a window averages over ranks.

    Backwards of ours run within `held`, and only gradients that they have added are reduced here.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        kept: GradientsIn,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.kept = kept
        self.takes_graphs = self.keeps_gradients = kept == "whole"
        self._device, self._inside = device, inside
        modules = [module for model in models for module in model.modules()]
        self.wrapped = [one for one in modules if isinstance(one, DistributedDataParallel)]
        if world_size() > 1:
            self.use_group(Group([None], device, rank=dist.get_rank()))
        self.replicas = self.group if self.wrapped else None
        self.averaged_by = float(self.ranks)
        self.begin()

    def begin(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._filled_in: set[int] = set()
        self.reduced = False  # True if the last backward was the host's, and has reduced
        self.held_back = False  # True if it was the host's, and has not

    def refuse_other_parameters(self, *given: Any) -> None:
        if self.wrapped:  # slices of other engines may differ in shape
            super().refuse_other_parameters(*given)

    def backward_made(self) -> None:
        """Note whether the host's engine has reduced in the backward that is over."""
        self.reduced = all(replica.require_backward_grad_sync for replica in self.wrapped)
        self.held_back = not self.reduced

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let backwards of ours pass within this context, without a reduction."""
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            for replica in self.wrapped:
                stack.enter_context(replica.no_sync())
            yield
        self.reduced = self.held_back = False

    def backward(self, parameters: Parameters, *, reduces: bool, overlap: bool) -> Context:
        return nullcontext()

    @torch.no_grad()
    def reduce_now(self, parameters: Parameters) -> None:
        if self.group is None or not parameters:
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        buckets = Buckets(parameters, None, self.group.wait)
        with buckets.reducing(overlap=False):
            pass
        self._filled_in = buckets.filled_in
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.averaged_by)

    def filled_in(self) -> set[int]:
        return self._filled_in

    def largest(self, value: Tensor) -> Tensor:
        return super().largest(value.to(self._device))  # parameters may be on the CPU

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        if self.kept != "elsewhere" and any(isinstance(one, DTensor) for one in gradients):
            return norm_over_meshes(gradients)
        if self.kept == "whole" or self.group is None:
            return super().total_norm(gradients)
        return self.group.norm(gradients)

    def discard(self) -> None:
        return


class HostScale(LossScale):
    """The loss scale of a host's GradScaler, which unscales and skips by itself before its step.

    `owner` has the scaler as its attribute `scaler`, if there is one.
    """

    is_undone_at_close = False

    def __init__(self, owner: object) -> None:
        self._owner = owner

    @property
    def scaler(self) -> Any:  # type: ignore[override]
        """The host's GradScaler, or None."""
        return getattr(self._owner, "scaler", None)

    @property
    def enabled(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def value(self) -> float:
        return super().value() if self.enabled else 1.0

    def update(self, *, finite: bool) -> None:
        return


class HostGradients(DeviceStore):
    """The gradients of a host's optimizers, which stay in `.grad` for the host to step with.

    Those of 16-bit parameters under DDP are added in fp32 beside `.grad`, which DDP's buckets need
    in the parameter's dtype. bf16 keeps 8 bits: 256 additions leave an error of 1.6e-2, fp32 of
    1.2e-3 (that of the gradients themselves).
    """

    lends = True
    takes_buffers = False
    sync: HostEngine

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._strangers: list[nn.Parameter] = []  # parameters of the models that nobody steps
        self._sums: dict[int, Tensor] = {}  # of 16-bit parameters, by id
        self._beside: list[nn.Parameter] = []  # those that the open window trains
        if self._adds_beside:
            self.only_eager = "16-bit parameters in DDP, which reduces their gradients in 16 bit"
        for optimizer in self.target.optimizers:
            optimizer.register_step_post_hook(lambda stepped, *_: _completed.discard(stepped))

    @property
    def _adds_beside(self) -> bool:
        return bool(self.sync.wrapped and self.target.sixteen_bit.parameters)

    @property
    def stray(self) -> str:  # type: ignore[override]
        why = (
            "the window before was completed, but no optimizer.step() was made from it"
            if _completed.issuperset(self.target.optimizers)
            else "this window did not make it"
        )
        return (
            "holds a gradient at the first backward of a window, and it would be counted in "
            f"({why}): call optimizer.zero_grad() after every optimizer.step(), and give every "
            "loss to the window"
        )

    def refuse_stray(self) -> None:
        if self.sync.kept != "elsewhere":
            super().refuse_stray()

    def begin(self, window: OpenWindow) -> None:
        kept = [] if self.sync.kept == "elsewhere" else window.inputs
        if self._adds_beside:
            self.target.sixteen_bit.end()
            self._beside = [one for one in kept if one.dtype in SIXTEEN_BIT]
            Store.begin(self, window)
        else:
            super().begin(window)
        self.parameters = kept
        own = {id(parameter) for parameter in window.inputs}
        everything = (p for model in self.target.models for p in model.parameters())
        self._strangers = [p for p in everything if kept and id(p) not in own]

    @torch.no_grad()
    def backward_made(self) -> None:
        """Take over the gradients that are added beside `.grad`."""
        for parameter in self._beside:
            gradient, there = parameter.grad, self._sums.get(id(parameter))
            if gradient is not None:
                wide = gradient.float()
                self._sums[id(parameter)] = wide if there is None else there.add_(wide)
                parameter.grad = None

    def reduce_now(self) -> None:
        """Reduce what no backward of the host has: all, or the sums beside `.grad`."""
        if self._beside:
            self.target.sixteen_bit.begin()
            for parameter in self._beside:
                parameter.grad = self._sums.get(id(parameter))
            self._sums.clear()
        self.sync.reduce_now(self._beside if self.sync.reduced else self.parameters)

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        return close_gradients(
            [[*self.parameters, *self._strangers]],
            (),
            self.options,
            normalise,
            hooks,
            total_norm=self.sync.total_norm,
            in_place=True,
        )

    def refuse_nothing(self) -> None:
        if self.parameters:
            super().refuse_nothing()

    def skip(self) -> None:
        """With a scaler, leave zeros and NaNs: it finds the NaNs and skips the step itself."""
        if self.target.scale is not None and self.target.scale.enabled:
            for gradient in dense_gradients(self.parameters):
                gradient.mul_(0.0)
            self.parameters = []

    def discard(self) -> None:
        for parameter in self._strangers if self.parameters else ():
            parameter.grad = None
        self._strangers = []
        self._sums.clear()
        super().discard()

    # A checkpoint is one file, and every rank holds gradients of its own until the last backward.
    # Their sum, given to one rank on the way back, leads to the same update.

    @torch.no_grad()
    def saved(self) -> list[Tensor | None]:
        held = [self._sums.get(id(one), one.grad) for one in self.parameters]
        if self.sync.group is None:
            return [None if gradient is None else gradient.clone() for gradient in held]
        ranks = self.sync.sum([float(gradient is not None) for gradient in held])
        return [
            self.sync.sum_tensor(_dense(gradient, parameter)) if on_ranks else None
            for gradient, parameter, on_ranks in zip(held, self.parameters, ranks, strict=True)
        ]

    def load(self, saved: Any) -> None:
        if self.sync.rank != 0:
            return
        beside = set(map(id, self._beside))
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None and id(parameter) in beside:
                self._sums[id(parameter)] = gradient.to(parameter.device, torch.float32)
            elif gradient is not None:
                parameter.grad = gradient.to(parameter.device, copy=True)


def _dense(gradient: Tensor | None, like: nn.Parameter) -> Tensor:
    """Return a gradient as all ranks can add it; zeros where this rank has none."""
    if gradient is None:
        return torch.zeros_like(like, dtype=torch.float32 if like.dtype in SIXTEEN_BIT else None)
    return gradient.to_dense() if gradient.is_sparse else gradient


@dataclass(frozen=True)
class AdapterOptions:
    """The options that every adapter over torch takes; impossible values are refused here."""

    batchnorm: str = "refuse"
    zero_units: Policy = "raise"
    nonfinite: Policy = "raise"
    audit: bool = True

    @property
    def close(self) -> CloseOptions:
        return CloseOptions(nonfinite=self.nonfinite, zero_units=self.zero_units)

    def __post_init__(self) -> None:
        self.close.check(())
        if self.batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact" in the loop of another library: exact BatchNorm runs the '
                "forwards of a window in lock-step, and they are not ours; use wb.WholeBatch, or "
                "name another policy"
            )


@dataclass(frozen=True)
class Settled:
    """A completed window: its exact mean loss over all units of all ranks."""

    loss: float
    units: float
    micro_batches: int


class HostWindows(Stream):
    """Windows whose backwards and updates a host makes.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(()))
    >>> windows = HostWindows([], [torch.optim.SGD([weight], lr=0.1)], device=torch.device("cpu"))
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0])):
    ...     mean = (weight * samples).mean()
    ...     windows.weigh(GivenLoss.of(mean=mean, units=len(samples)))
    ...     with windows.host_backward():
    ...         mean.backward()                          # the host's
    >>> settled = windows.settle()
    >>> weight.grad.item(), settled.loss, settled.units
    (3.5, 3.5, 4.0)

    `gradients` says where the host keeps them within a window. `owns_forward`: the adapter calls
    the forward itself, so that it looks at it by a `FirstLook`. `scaled_by` has the host's
    GradScaler as its attribute `scaler`, if there is one. `divided_by()` is what the host itself
    divides a loss by on the way (its number of micro-batches), to be undone. Backwards of ours run
    within `inside()`. Where an engine lets only its own `window` make backwards and updates
    (DeepSpeed), that is given, and `add` takes the place of `weigh` and `host_backward`. `updates`
    were made before.
    """

    by = "the host"

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        options: AdapterOptions | None = None,
        gradients: GradientsIn = "whole",
        owns_forward: bool = False,
        scaled_by: object = None,
        divided_by: Callable[[], float] = lambda: 1.0,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        window: Window | None = None,
        updates: int = 0,
    ) -> None:
        self.options = options or AdapterOptions()
        self.last: Settled | None = None
        self.kept = gradients
        self._steps = window is not None
        self._divided_by, self._divisor = divided_by, 1.0
        self._engine = HostEngine(models, device, gradients, inside)
        self._scale = HostScale(scaled_by)
        for model in models if gradients == "sharded" else ():
            check_dtypes(model)
        if window is None:
            stepped = tuple(optimizers) or (stand_in(models),)
            sixteen_bit = SixteenBit(optimizers if gradients == "whole" else ())
            target = Target(tuple(models), stepped, (), None, self._scale, sixteen_bit)
            store = HostGradients(target, self.options.close, self._engine)
            window = Window(target, self.options.close, self._engine, store)
        super().__init__(window, batchnorm=self.options.batchnorm, audit=self.options.audit)
        self._window.updates = updates
        # An engine that shards has collectives in its forwards and backwards.
        self.may_look = gradients == "whole" and self.options.audit
        if gradients == "whole" and not owns_forward:
            if not self._engine.wrapped:
                ours = "the model that accelerator.prepare() or fabric.setup() returned"
                warn_alone(self.sync.ranks, ours)
            self._look.watch()

    @property
    def sync(self) -> Sync:
        """The processes whose batches together make the global batch."""
        return self._window.sync

    @property
    def open(self) -> OpenWindow | None:
        """The window that is not settled yet, if there is one."""
        return self._window.open

    # -------------------------------------------------------------------- add

    def weigh(
        self,
        given: GivenLoss,
        flowing: Tensor | None = None,
        *,
        announced: float | None = None,
        is_last: bool = False,
    ) -> None:
        """Give this micro-batch's loss its weight; the host's backward of it comes next.

        With `announced`, the units of the window on all ranks, the host's backward starts at
        `flowing`, the share of this loss in the window's mean. `is_last`: the loss is known to be
        the window's last.
        """
        is_whole = is_last and self.open is None and self.sync.ranks == 1
        window = self._begin_loss(given, is_whole=is_whole, announced=announced)
        window.record({SINGLE: given.total}, {SINGLE: given.units}, {SINGLE: 1.0})
        self._count_micro_batch()
        if flowing is not None:
            window.weigh(flowing)
        else:
            scale = window.averaged_by * self._divisor
            window.weigh(given.loss, given.weight * window.seed * scale)

    def add(self, given: GivenLoss, *, last: bool) -> None:
        """Make the backward of a loss by the window's own engine."""
        self._begin_loss(given)
        self._window.add(given.summed, given.units, last=last)
        self._look.done()
        self._count_micro_batch()

    def _begin_loss(
        self, given: GivenLoss, *, is_whole: bool = False, announced: float | None = None
    ) -> OpenWindow:
        """Open the window for its first loss; refuse a loss that does not belong here."""
        self.pending.refuse()
        if self.open is not None:
            self.open.refuse_broken()
        one_number = isinstance(given.loss, Tensor) and given.loss.numel() == 1
        check_total(given.loss.reshape(()) if one_number else given.loss)
        given.look_at(self._look, in_parts=not is_whole, steps=self._planned_steps)
        if self.open is None:
            self._begin_window()
            known = None if announced is None else {SINGLE: announced}
            return self._window.begin(given.units, known=known)
        self._untouched.check()
        divisor = self._divided_by()
        if divisor != self._divisor:
            raise WindowError(
                f"the window's first loss was divided by {self._divisor:g}, this one is by "
                f"{divisor:g}: change the number of micro-batches between windows"
            )
        return self.open

    @property
    def _planned_steps(self) -> int:
        return int(self._divided_by())

    def _begin_window(self) -> None:
        """Refuse a BatchNorm that is in train mode by now; note what the host divides by."""
        for policy in self._refusing:
            policy.begin_window()
        self._divisor = self._divided_by()

    def _count_micro_batch(self) -> None:
        self._window.micro_batch_done()
        for policy in self._counting:
            policy.micro()

    @contextmanager
    def host_backward(self) -> Iterator[None]:
        """Run the host's backward of the loss that was weighed within this context."""
        try:
            yield
        except BaseException:
            self.mark_broken()
            raise
        self.backward_made()

    def backward_made(self) -> None:
        """Note how the host's backward leaves the gradients."""
        self._window.store.backward_made()
        self._untouched.remember()
        self._look.done()
        self._engine.backward_made()

    @contextmanager
    def micro_step(self, modules: nn.Module) -> Iterator[bool]:
        """Return the context of a compiled function's micro-step; see `Stream`."""
        if self.open is None:
            self._begin_window()
        with super().micro_step(modules) as may_compile, self._engine.held():
            yield may_compile

    def add_eagerly(self, loss: Loss | Terms) -> None:
        """Make the backward of a compiled function's loss by eager code."""
        given = GivenLoss.of(loss)
        self._begin_loss(given)
        self._window.add(given.loss, given.units)

    def take(self, loss: AddedLoss) -> None:
        """Enter the loss of a compiled function, whose gradient is in the window."""
        self.pending.take(loss, self)
        self._look.done()
        self._count_micro_batch()

    # ----------------------------------------------------------------- settle

    def settle(self) -> Settled | None:
        """Bring the window's reduced gradients to those of the undivided global batch.

        Return None where the window makes no update (`zero_units="skip"`, `nonfinite="skip"`, a
        loss scale that was too large): no gradient is left, so that the host's step changes
        nothing, or one that the host's scaler skips. After an error none is left either.
        """
        if self.open is None:
            raise WindowError("settle() without a micro-batch: no backward was weighed")
        self.pending.refuse()
        try:
            self._check_complete(self.open)
        except (WindowError, LossError):
            self.discard()
            raise
        step, self.last = self._close_window(steps=self._steps), None
        _completed.update(self._window.target.optimizers)
        if step.skipped is None:
            self.last = Settled(step.loss, step.units, step.micro_batches)
            self._window.updates += not self._steps
        return self.last

    def _check_complete(self, window: OpenWindow) -> None:
        """Refuse gradients that others changed, a loss without its backward, and a held sync."""
        number = window.micro_batches
        if number > 1 or self.sync.ranks > 1:
            self._look.end_window(number)
        if not self._scale.enabled:  # a scaler may have unscaled the gradients already
            self._untouched.check()
        if self.kept != "elsewhere" and window.unmade:
            raise WindowError(
                f"{number} losses were weighed in this window, and {number - window.unmade} "
                "backwards came: every loss needs its one backward, so that its units are counted "
                "with its gradient"
            )
        if self.sync.ranks > 1 and self._engine.held_back:
            raise WindowError(
                "the last backward of this window did not reduce the gradients over the "
                f"{self.sync.ranks} processes: the last micro-batch must make its backward, "
                "outside of no_sync (loss * 0 and units=0 for one that does not count)"
            )

    def detach(self) -> None:
        """Leave the models as they were found (a conversion of BatchNorm is kept)."""
        self._window.hooks.give_back()
        self._look.end_window()
        for policy in self._batchnorms:
            policy.detach()

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the window, with its gradients, of all ranks together; call it on all of them."""
        self.pending.refuse()
        saved: dict[str, Any] = {
            "updates": self.updates,
            "next_seed": self._window.next_seed,
            "batchnorms": [policy.state_dict() for policy in self._batchnorms],
            "window": None,
        }
        if self.open is not None:
            window = self._window.open_state()
            both = [math.fsum(window[name].get(SINGLE, ())) for name in ("totals", "units")]
            total, units = self.sync.sum(both)
            window.update(totals={SINGLE: [total]}, units={SINGLE: [units]}, owners=[0])
            saved["window"] = {**window, "divided_by": self._divisor}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue a saved window; only the first rank adds its totals and units."""
        if not isinstance(saved, dict) or "window" not in saved:
            raise StateError("this is not the state of a window (it has no 'window')")
        window = saved["window"]
        self._window.check_open_state(window)
        self.discard()
        self._window.updates, self._window.next_seed = saved["updates"], saved["next_seed"]
        for policy, state in zip(self._batchnorms, saved["batchnorms"], strict=True):
            policy.load_state_dict(state)
        if window is not None and self.sync.rank != 0:
            window = {**window, "totals": {SINGLE: [0.0]}, "units": {SINGLE: [0.0]}}
        self._window.load_open_state(window)
        self._divisor = 1.0 if window is None else window["divided_by"]


class LoopWindows(HostWindows):
    """The base of adapters whose user writes the loop (Accelerate's, Fabric's).

    `engine` names what keeps gradients within a window where they are not whole; `save_when` and
    `step_after` say what to do in errors.
    """

    engine_kind: object
    save_when: ClassVar[str]
    step_after: ClassVar[str]

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        super().__init__(models, optimizers, **options)
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in optimizers]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().detach()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step from a part of a window, and one from gradients that no window made."""
        if self.open is not None:
            raise WindowError(f"optimizer.step() while the window is open: {self.step_after}")
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        if optimizer not in _completed and any(one.grad is not None for one in parameters):
            raise WindowError(
                "optimizer.step() with gradients that no window has made, so that nothing makes "
                f"them those of the whole batch: give every loss to windows.backward() of this "
                f"{type(self).__name__}, in place of the library's own backward(); to go on "
                "without it, call windows.detach()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the library's own checkpoints; an open window is kept whole.

        Its gradients, which those checkpoints leave out, are added over the processes.
        """
        if self.open is not None and self.kept != "whole":
            raise WindowError(
                f"the window is open with {self.micro_batches} micro-batches, and its gradients "
                f"are inside {self.engine_kind}: save {self.save_when}"
            )
        return super().state_dict()


def refuse_shared_batches(accelerator: Any, host: str) -> None:
    """Refuse an Accelerator whose ranks share batches, so that units would be counted twice."""
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_size", 1) > 1:
            raise UnsupportedError(
                f"{host} with {name}_size={getattr(parallel, f'{name}_size')}: units would be "
                "counted more than once over ranks that share a batch; use data parallelism alone"
            )


class FirstLook(LossLook):
    """Looks once whether the loss of a host's micro-batches adds up.

    A run of the loss may change attributes of `host`, beside the model's. Numbers among them, and
    small containers (a trainer's metrics), are put back.
    """

    def __init__(self, model: nn.Module, windows: HostWindows, *, host: object, off: str) -> None:
        super().__init__(model, windows.sync, looks=windows.may_look, off=off)
        self._windows, self._host = windows, host

    @property
    def pending(self) -> bool:
        if self._windows.open is not None:
            return False
        self.begin_window()
        return super().pending

    def at(
        self, run: Callable[[Any], Loss], batch: Any, *, micro_batch: int | None, steps: int
    ) -> None:
        """Refuse a loss that does not add up, on the first samples of `batch`, on all ranks."""
        try:
            with attributes_restored(self._host):
                self.look_at(
                    run,
                    lambda: (readable_layout(batch, None, ()), micro_batch),
                    steps=[steps],
                    name="the loss",
                )
        finally:
            self._windows.discard()  # what BatchNorm policies have recorded of the runs
