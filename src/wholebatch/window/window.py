"""The window: begin, add, close. One update from its first micro-batch to its step.

Every micro-batch's backward starts from a *seed*, the same number for the whole window and for all
ranks, and adds `seed × d(total)` into the gradients. It is a power of two near `1 / units`, so that
multiplying by it does not round: of the units that were counted before (`known`), else of those of
the window before, else of the first micro-batch. The close knows the units and corrects with one
factor. A loss of several terms has a seed for each, `weight / units` of the term.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.sync_strategy import OTHER_SETTINGS
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    RankError,
    StateError,
    UnsupportedError,
    WindowError,
)
from wholebatch.losses.loss import (
    SINGLE,
    Loss,
    Term,
    Terms,
    Units,
    check_total,
    check_units,
    is_nothing,
)
from wholebatch.window.close import (
    CloseOptions,
    DeferredHooks,
    OnGradient,
    Reading,
    Sums,
    check_counts,
    check_terms,
    column,
    power_of_two_near,
    read_scalars,
    scalar_on,
)
from wholebatch.window.forward_state import capture_random, restore_random
from wholebatch.window.gradient_store import Store
from wholebatch.window.model_and_optimizer import Schedules, Target
from wholebatch.window.precision import LossScale

_SECOND_BACKWARD = (
    "an earlier backward has freed a part of this loss's graph. If the loop calls "
    "loss.backward(), remove it: the window runs the backward pass. Otherwise two losses share a "
    "graph: add them and call backward once, or detach() or recompute what they share (a hidden "
    "state, an encoder's output)"
)
_OTHER_UNITS = (
    "two backwards of one micro-batch with different units ({first} and {again}): pass the "
    "same units to all of them (they are counted once), and more=True to all but the last. For a "
    "loss over other units, use wb.Loss.terms(...) after announce()"
)
_CLAMPED = (
    "the loss of a micro-batch is exactly 0 over 1 unit, and another micro-batch has %g units. If "
    "the units are clamped, as in max(count, 1), the window is divided by too many: pass the "
    "count itself (close=wb.Close(zero_units='skip') skips a window without units). If this loss "
    "is rightly 0, go on: this is said once, and not at all with audit=False"
)
_log = logging.getLogger("wholebatch")
_FORMAT = 2  # of a state dict
observers: list[Any] = []
"""Called when a window begins, closes and ends (`wb.watch` reads its units at the close)."""
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def graph_nodes(totals: Iterable[Any], until: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield every node of the graph at and below these totals or nodes, and above `until`."""
    stack: list[Any] = [getattr(total, "grad_fn", total) for total in totals]
    seen: set[Any] = set(until)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            stack.extend(successor for successor, _ in node.next_functions)


def refuse_freed_graph(error: BaseException) -> None:
    """Raise a LossError if `error` is torch's of a graph that an earlier backward has freed."""
    if "through the graph a second time" in str(error):
        raise LossError(_SECOND_BACKWARD) from error


def refuse_reentrant(totals: Iterable[Tensor]) -> None:
    """Refuse a graph with reentrant activation checkpointing.

    It cannot add into chosen parameters alone (a GAN's generator loss flows through the judge,
    whose parameters must not be added to).
    """
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_nodes(totals)):
        raise UnsupportedError(
            "torch.utils.checkpoint with use_reentrant=True: its backward adds to the gradients "
            "of all parameters, not only to those of the window; pass use_reentrant=False "
            '(Transformers: gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


UnitsFunction: TypeAlias = Callable[[Any], Units | Mapping[str, Units]]


class UnitsCount:
    """Count all units of a window, by term, over the ranks too, before its first backward."""

    def __init__(self, units: UnitsFunction, sync: Sync) -> None:
        self._units = units
        self._sync = sync
        self._names = [SINGLE]

    def learn(self, like: Any) -> None:
        """Take the names of the terms from a batch that is not counted."""
        self._names = sorted(count_units(self._units, [like]))

    def __call__(self, micros: Sequence[Any]) -> dict[str, float]:
        counted = count_units(self._units, micros) or dict.fromkeys(self._names, 0.0)
        self._names = sorted(counted)
        sums = self._sync.sum([counted[name] for name in self._names])
        return dict(zip(self._names, sums, strict=True))


def count_units(units: UnitsFunction, micros: Sequence[Any]) -> dict[str, float]:
    """Return the units of all micro-batches, by term; a number counts the unnamed term."""
    counts: dict[str, list[Units]] = {}
    for micro in micros:
        counted = units(micro)
        by_name = counted if isinstance(counted, Mapping) else {SINGLE: counted}
        if counts and by_name.keys() != counts.keys():
            raise LossError(
                f"units= counted the terms {sorted(by_name)} in one micro-batch and "
                f"{sorted(counts)} in another: return all terms for each, 0 where none"
            )
        for name, count in by_name.items():
            counts.setdefault(name, []).append(check_units(count))
    numbers = {name: read_scalars(values) for name, values in counts.items()}
    for values in numbers.values():
        _check_units(values, counted=True)
    return {name: math.fsum(values) for name, values in numbers.items()}


def _same_units(first: Units, again: Units) -> Units:
    """Return 0, the units that a further backward of a micro-batch adds; refuse other units.

    On a device nothing can be read now: NaN stands for other units until the close reads it.
    """
    if isinstance(first, Tensor) or isinstance(again, Tensor):
        like = first if isinstance(first, Tensor) else again
        assert isinstance(like, Tensor)
        same = scalar_on(like.device, first, torch.float64) == scalar_on(
            like.device, again, torch.float64
        )
        return torch.where(same, 0.0, math.nan)
    if first != again:
        raise LossError(_OTHER_UNITS.format(first=first, again=again))
    return 0


def _check_units(
    counts: Sequence[float], repeated: Collection[int] = (), *, counted: bool = False
) -> None:
    """Refuse units that are negative or not finite, now that those on a device were read.

    `repeated` are the places of further backwards of a micro-batch.
    """
    for place, count in enumerate(counts, 1):
        if math.isnan(count) and place - 1 in repeated:
            raise LossError(_OTHER_UNITS.format(first="one number", again="another"))
        if not 0 <= count < math.inf:
            must = "must be finite and not negative"
            if counted:
                raise LossError(f"units= counted {count:g}: {must}")
            raise LossError(
                f"units={count:g} of the window's backward {place}: {must}, what the loss is a sum "
                "over (samples, tokens, weights)"
            )


class Turn:
    """Refuse a call while another one is running, in a second thread or inside the first.

    Both would write the same gradients at once. A lock that waits would hide the first mistake and
    never return from the second.

    >>> turn = Turn("WholeBatch.step()")
    >>> with turn:
    ...     turn.taken
    True
    >>> turn.taken
    False
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._lock = threading.Lock()
        self.failed = False
        """True if the last call has raised."""

    @property
    def taken(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WindowError(
                f"{self._call} is running already, and was called again from another thread or "
                "from inside itself (its loss function, a hook, a callback). Calls must come one "
                "after the other; give each thread its own model and its own wholebatch object"
            )

    def __reduce__(self) -> NoReturn:
        owner = self._call.partition(".")[0]
        raise UnsupportedError(
            f"{owner} cannot be pickled or copied: it holds hooks, buffers and locks of this "
            "process. Save its state_dict() with those of the model and the optimizer, create a "
            f"new {owner}, and load them into it"
        )

    def __exit__(self, *error: object) -> None:
        self.failed = error[0] is not None
        self._lock.release()


_SINGLE_WEIGHT = {SINGLE: 1.0}


@dataclass(frozen=True, repr=False)
class Step:
    """The report of one update: its exact mean loss, its units and its gradient norm.

    Attributes:
        update: The number of updates so far, this one included.
        loss: The mean over all units of the window and of all ranks.
        units: These units.
        grad_norm: The norm of the normalised gradient, after `on_gradient=` and before clipping.
        micro_batches: The micro-batches of this rank.
        seconds: The time of the window on the host's clock.
        clip: The factor by which clipping multiplied the gradient.
        loss_scale: The GradScaler's scale in this window; 1 without one.
        terms: The mean of each term of a `wb.Loss.terms`, by name.
        skipped: The reason when no update was made, else None.
    """

    update: int
    loss: float
    units: float
    grad_norm: float
    micro_batches: int
    seconds: float
    clip: float = 1.0
    loss_scale: float = 1.0
    terms: Mapping[str, float] = field(default_factory=dict)
    skipped: str | None = None

    def __repr__(self) -> str:
        said = f"loss={self.loss:.6g}, units={self.units:g}, grad_norm={self.grad_norm:.4g}"
        said += f", micro_batches={self.micro_batches}, seconds={self.seconds:.3g}"
        said += f", skipped={self.skipped!r}" if self.skipped else ""
        return f"Step(update={self.update}, {said})"


@dataclass(eq=False)
class OpenWindow:
    """The record of a window while it is open: `Window.begin` makes it, the close consumes it."""

    groups: list[list[nn.Parameter]]
    """The parameters that are trained, by parameter group."""
    known: Mapping[str, float] | None = None
    """All units by term, if they were counted over the window and all ranks before."""
    seed: float | Tensor = 1.0
    averaged_by: float = 1.0
    scale: LossScale | None = None
    loss_scale: float = 1.0
    totals: dict[str, list[Any]] = field(default_factory=dict)
    units: dict[str, list[Any]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)
    """The micro-batch of each total (one may have several)."""
    are_units_given: bool = False
    """True if a loop gave a loss with its units, and no test of a loss function has seen them."""
    micro_batches: int = 0
    more_of_micro_batch: bool = False
    """True if the next backward is a further one of the same micro-batch."""
    repeated: set[int] = field(default_factory=set)
    """The places in `units` of such backwards."""
    broken: bool = False
    """True if a backward failed half way and added a part of a micro-batch."""
    reduced: bool = False
    """True if the last backward has reduced the gradients over the ranks."""
    started: float = field(default_factory=perf_counter)
    _last_seed: tuple[str, float, Tensor] | None = None
    _units_of_micro_batch: dict[str, Units] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = [parameter for group in self.groups for parameter in group]
        self._scaling = 1.0  # of every backward; a scaler's own scale may move before the close
        if self.scale is not None:
            self._scaling = self.scale.value()
            self.loss_scale = self._scaling if self.scale.is_undone_at_close else 1.0

    @property
    def has_terms(self) -> bool:
        """True if each term is divided by its own units, which were counted before."""
        return self.known is not None and self.known.keys() != {SINGLE}

    def refuse_broken(self) -> None:
        """Refuse to continue a window that holds a part of a micro-batch."""
        if self.broken:
            raise WindowError(
                "the last backward of this window failed half way and left part of its gradients "
                "behind: call discard() before going on"
            )

    def record(
        self,
        totals: Mapping[str, Tensor | float],
        units: Mapping[str, Units],
        weights: Mapping[str, float],
        *,
        counts: bool = True,
    ) -> None:
        """Record the loss of a backward; one that does not count is 0.

        The units of a micro-batch count once, however many backwards it has: its first backward
        records them, and the others must have the same.
        """
        for name, total in totals.items():
            counted = units[name] if counts else 0
            if self.more_of_micro_batch and name in self._units_of_micro_batch:
                counted = _same_units(self._units_of_micro_batch[name], counted)
                self.repeated.add(len(self.units[name]))
            else:
                self._units_of_micro_batch[name] = counted
            self.totals.setdefault(name, []).append(total if counts else 0.0)
            self.units.setdefault(name, []).append(counted)
        for name, weight in weights.items():
            first = self.weights.setdefault(name, weight)
            if weight != first:
                raise LossError(
                    f"the weight of term {name!r} is {first:g} in one micro-batch of this window "
                    f"and {weight:g} in another: it belongs to the whole window; multiply the "
                    "totals by what differs between samples"
                )
        self.owners.append(self.micro_batches)

    def seed_of(self, name: str, total: Tensor, weight: float, *, counts: bool = True) -> Tensor:
        """Return the number that the backward of this total starts from."""
        last = self._last_seed  # nearly always it is the same again
        if last is not None and last[:2] == (name, weight) and counts:
            value = last[2]
            if value.dtype is total.dtype and value.device == total.device:
                return value
        seed = self.seed
        if not counts:
            seed = 0.0
        elif self.has_terms:
            counted = self.known[name] if self.known else 0.0
            seed = self.seed * weight / counted if counted else 0.0
        value = scalar_on(total.device, seed * (self.averaged_by * self._scaling), total.dtype)
        if counts:
            self._last_seed = (name, weight, value)
        return value

    def fix_seeds(self, terms: Mapping[str, Term]) -> None:
        """Choose one factor of all seeds, before the first backward, for totals in 16 bits.

        Each term has another weight / units, which 16 bits round; the close can undo one factor
        only. So the factor is the one by which the seeds are rounded least.
        """
        assert self.known is not None
        factors = 1 + torch.arange(4096, dtype=torch.float64) / 4096
        gaps = [torch.zeros_like(factors)]
        for name, term in terms.items():
            if self.known[name] and term.weight:
                seeds = factors * term.weight / self.known[name]
                gaps.append((seeds.to(torch.bfloat16) / seeds - 1).abs())
        self.seed = float(factors[torch.stack(gaps).amax(0).argmin()])


def is_tested_window(number: int) -> bool:
    """Return True for windows 1, 2, 4, 8, ...; the first window of a run has number 1.

    The loss must add up and graphs must compute what eager code does in every window. A mistake may
    show only in later data (padding, a rare class) or after the weights have moved. Testing at
    powers of two costs ten tests in 1,000 windows.

    >>> [number for number in range(1, 20) if is_tested_window(number)]
    [1, 2, 4, 8, 16]
    """
    return number > 0 and number & (number - 1) == 0


def _without_nothing(
    totals: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Leave out the totals of means over no units: they add nothing, and may divide by zero."""
    if not any(map(is_nothing, totals)):
        return totals, seeds
    pairs = [pair for pair in zip(totals, seeds, strict=True) if not is_nothing(pair[0])]
    return [total for total, _ in pairs], [seed for _, seed in pairs]


_NO_WINDOW = OpenWindow([])


class Window:
    """The micro-batches that together make one update, one window after the other."""

    def __init__(
        self,
        target: Target,
        options: CloseOptions,
        sync: Sync,
        store: Store | None = None,
        on_gradient: OnGradient | None = None,
        *,
        audit: bool = True,
    ) -> None:
        self.target = target
        clips = sync.clip_norm is not None
        self.options = replace(options, clip_norm=sync.clip_norm) if clips else options
        self.sync = sync
        self.store = Store(target, self.options, sync) if store is None else store
        self.store.options = self.options
        self.open: OpenWindow | None = None
        self._warns_of_clamped = audit
        self._agreed = False  # True if all ranks are known to train the same parameters
        self.updates = 0
        self.skipped = 0
        self.next_seed: float | None = None
        self._last_weights: dict[str, float] = {SINGLE: 1.0}
        self.calls_on_gradient = on_gradient is not None
        self.leaves_gradients = not target.steps  # whether the last window has left them in .grad
        self.hooks = DeferredHooks(on_gradient, target.named_parameters)
        self.schedules = Schedules(target.schedulers)

    # ------------------------------------------------------------------ begin

    def begin(self, units: Units = 1, *, known: Mapping[str, float] | None = None) -> OpenWindow:
        """Open the window. `known`: all units by term, counted over the window and all ranks."""
        if self.open is not None:
            raise WindowError("begin() on an open window: close or discard it first")
        self.options.check(self.target.optimizers)  # a group may have been added
        groups = self.target.groups()
        trained = [parameter for group in groups for parameter in group]
        stepped = self.sync.stepped(trained)
        self.store.refuse_stray(trained)
        if stepped is not trained:
            self.store.refuse_stray(stepped)
        self.schedules.refuse_moved()
        window = OpenWindow(groups, known, 1.0, self.sync.averaged_by, self.target.scale)
        if not window.inputs:
            raise WindowError("every parameter of the optimizer is frozen: nothing to train")
        if not self.sync.owns_hooks:
            self.target.refuse_hooks(stepped)
        if not self.sync.owns_step:
            self.target.refuse_cast(stepped)
        self._refuse_other_ranks()
        self.store.begin(window.inputs)
        self.sync.begin(window.inputs)
        self.hooks.take(stepped)
        if known is None:
            window.seed = self.next_seed or self._first_seed(units)
        elif not window.has_terms:
            window.seed = power_of_two_near(1.0 / (known[SINGLE] or 1.0))
        self.open = window
        for observer in observers:
            observer.window_began(self)
        return window

    def _refuse_other_ranks(self) -> None:
        """Refuse ranks that train other parameters, before gradients are added up."""
        if not self._agreed and self.sync.ranks > 1:
            digest, parameters = self.target.digest(self.options), self.target.all_parameters()
            self.sync.refuse_other_ranks(digest, parameters.values())
        self._agreed = True

    def _first_seed(self, units: Units) -> float | Tensor:
        """Return a power of two near 1/units of the first micro-batch, the same on every rank."""
        if isinstance(units, Tensor):  # stays on the device: no synchronisation
            largest = self.sync.largest(units.to(torch.float32)).clamp(min=1.0)
            return torch.exp2(-torch.log2(largest).round())
        if self.sync.ranks > 1:
            units = float(self.sync.largest(torch.tensor(float(units), device=self.target.device)))
        return power_of_two_near(1.0 / max(float(units), 1.0))

    def open_early(self) -> bool:
        """Open the window if its seed is known without a loss; return True if it is open."""
        if self.open is None and self.next_seed is not None:
            self.begin()
        return self.open is not None

    @property
    def number(self) -> int:
        """The number of the window that is open, or comes next; the first has 1."""
        return self.updates + self.skipped + 1

    @property
    def is_test_window(self) -> bool:
        """True in windows 2, 4, 8, 16, …: what was tested before the first one is tested again."""
        return self.number > 1 and is_tested_window(self.number)

    @property
    def current(self) -> OpenWindow:
        """The open window, where there must be one."""
        assert self.open is not None, "no window is open"
        return self.open

    @property
    def now(self) -> OpenWindow:
        """The open window; an empty one where none is open."""
        return _NO_WINDOW if self.open is None else self.open

    @property
    def only_eager(self) -> str | None:
        """The reason why micro-steps can only run by eager code; None where there is none."""
        if not self.sync.takes_graphs:
            return "this engine's collectives run in its forwards and backwards, by eager code"
        return None

    @property
    def lends_buffers(self) -> bool:
        """True if eager code may add into the buffers of graphs from the start.

        It may not if ranks must know which parameters have no gradient, nor if an optimizer
        requires sparse gradients: in a buffer they would become dense.
        """
        sparse = any(isinstance(one, torch.optim.SparseAdam) for one in self.target.optimizers)
        return self.sync.ranks == 1 and not sparse

    # -------------------------------------------------------------------- add

    def add(self, total: Tensor, units: Units, *, last: bool = False, counts: bool = True) -> None:
        """Run the backward of one total into the gradients. Nothing is read from the device.

        `last`: it is the window's last backward, which reduces. One that does not count only takes
        part in the collectives of the other ranks.
        """
        check_total(total)
        units = check_units(units)
        window = self.begin(units) if self.open is None else self.open
        if window.has_terms:
            raise LossError(
                f"units= counts the terms {sorted(window.known or ())}, but the loss has no named "
                "terms: return wb.Loss.terms({...}) with the same names"
            )
        window.record({SINGLE: total.detach()}, {SINGLE: units}, _SINGLE_WEIGHT, counts=counts)
        self.backward([total], [window.seed_of(SINGLE, total, 1.0, counts=counts)], last=last)

    def add_loss(self, loss: Loss | Terms, *, last: bool = False, counts: bool = True) -> None:
        """Run the backward of one micro-batch's loss, plain or in terms (see `add`)."""
        if isinstance(loss, Loss):
            self.add(loss.total, loss.units, last=last, counts=counts)
            return
        check_terms(self.now.known, loss.by_name)
        terms, window = loss.by_name.items(), self.current
        if not window.owners and self.sync.ranks == 1:
            window.fix_seeds(loss.by_name)
        window.record(
            {name: term.total.detach() for name, term in terms},
            {name: term.units for name, term in terms},
            {name: term.weight for name, term in terms},
            counts=counts,
        )
        seeds = [window.seed_of(n, term.total, term.weight, counts=counts) for n, term in terms]
        self.backward([term.total for _, term in terms], seeds, last=last)

    def backward(
        self,
        totals: Sequence[Tensor],
        seeds: Sequence[Tensor],
        also: Sequence[Tensor] = (),
        *,
        last: bool = False,
    ) -> None:
        """Add the gradients of totals, times their seeds, into the parameters and into `also`."""
        sync, window = self.sync, self.current
        window.refuse_broken()
        try:
            with sync.backward(window.inputs, reduces=last):
                if sync.grows_own_graph:
                    sync.run_backward(totals, seeds)
                else:  # into the window's parameters alone
                    inputs = [*window.inputs, *also]
                    if not sync.counts_must_agree:
                        totals, seeds = _without_nothing(totals, seeds)
                    if totals:
                        torch.autograd.backward(totals, seeds, inputs=inputs)
        except BaseException as error:
            window.broken = True  # some gradients of this micro-batch are in, others are not
            refuse_freed_graph(error)
            if isinstance(error, RuntimeError) and not sync.grows_own_graph:
                refuse_reentrant(totals)
            raise
        window.reduced = last and sync.reduces_in_backward

    def micro_batch_done(self) -> None:
        """Count a micro-batch after its last backward."""
        window = self.current
        window.micro_batches += 1
        window.more_of_micro_batch = False

    # ------------------------------------------------------------------ close

    def close(
        self,
        *,
        steps: bool = True,
        while_waiting: Callable[[], object] | None = None,
    ) -> Step:
        """Reduce, rescale, clip, step, schedule, clear. The window is over in any case.

        Without `steps` the gradients stay in `.grad`, for the user to step with and to clear.
        `while_waiting()` is called where the host waits for the device.
        """
        for observer in observers:
            observer.window_closes(self)
        try:
            self.leaves_gradients = not (steps and self.target.steps)
            return self._close(self.current, not self.leaves_gradients, while_waiting)
        finally:
            self.discard()
            # An autocast around the whole loop would go on with casts of the old weights.
            torch.clear_autocast_cache()

    def _close(
        self,
        window: OpenWindow,
        steps: bool,
        while_waiting: Callable[[], object] | None,
    ) -> Step:
        window.refuse_broken()
        self.schedules.refuse_moved(in_window=True)
        if not self.sync.owns_step:
            self.target.refuse_cast(self.sync.stepped(window.inputs))
            self.target.refuse_other_parameters(window.inputs)
        if not self.sync.owns_hooks:
            self.hooks.refuse_added(window.inputs)
        if not window.reduced:
            self.sync.reduce_now(window.inputs)
        weights = window.weights or self._last_weights  # none: this rank only joins the others
        names = sorted(weights)
        device = self.target.device
        totals = [column(window.totals.get(name, ()), device) for name in names]
        units = [column(window.units.get(name, ()), device) for name in names]
        sums = self._sums(window, names, totals, units)
        unread = steps and bool(window.totals) and self.store.can_step_unread(self.hooks)
        closed = self.store.close(window.groups, sums, self.hooks, waits=not unread)
        reading = Reading(*closed, sums.totals, sums.units, *totals, *units)
        if unread:
            self.store.update(closed.is_valid.logical_not().float())
        if while_waiting is not None:
            while_waiting()
        (norm,), (clip,), (is_valid,), sum_of, units_of, *lists = reading.wait()
        if unread and not is_valid:  # the device has left all as it was
            unread = False
            closed = self.store.close(window.groups, sums, self.hooks, waits=True)
            (norm,), (clip,), (is_valid,) = Reading(*closed).wait()
        totals_of_each, units_of_each = lists[: len(names)], lists[len(names) :]
        for totals_of_term, units_of_term in zip(totals_of_each, units_of_each, strict=True):
            _check_units(units_of_term, window.repeated)
            self._warn_of_clamped_units(totals_of_term, units_of_term)
        count = max(units_of)
        if math.isnan(count):
            raise LossError("another rank has units that are negative or not finite")
        if count == 0.0:
            return self._empty(window)
        if window.known is not None:
            check_counts(window.known, dict(zip(names, units_of, strict=True)))
        means = {
            name: total / counted if counted else 0.0
            for name, total, counted in zip(names, sum_of, units_of, strict=True)
        }
        loss = math.fsum(weights[name] * means[name] for name in names)
        if norm == 0.0:
            self.store.refuse_nothing()
        if self.hooks.calls and self.sync.ranks > 1 and not self.sync.grows_own_graph:
            self._refuse_other_norm(norm)
        skipped = None
        if is_valid:
            self._update(loss, steps, stepped=unread)
        else:
            skipped = self._nonfinite(window, totals_of_each, all(map(math.isfinite, sum_of)))
        if self.target.scale is not None:
            self.target.scale.update(finite=bool(is_valid))
        self.skipped += skipped is not None
        self.sync.after_update()
        self.next_seed = power_of_two_near(1.0 / count)
        self._last_weights = weights
        return self._report(
            window,
            loss=loss,
            units=count,
            grad_norm=norm,
            clip=clip if is_valid else 1.0,
            terms=means if names != [SINGLE] else {},
            skipped=skipped,
        )

    def _sums(
        self,
        window: OpenWindow,
        names: Sequence[str],
        totals: Sequence[Tensor],
        units: Sequence[Tensor],
    ) -> Sums:
        """Return totals and units of each term over the window and all ranks (one collective).

        With them go a digest of this rank's settings, and which parameters have a gradient here:
        one that has none on any rank keeps none, as for the undivided batch.
        """
        total = torch.stack([one.sum() for one in totals])
        # Units that are not valid on this rank must stop the update of every rank.
        count = torch.stack([torch.where(one >= 0, one, math.nan).sum() for one in units])
        if self.sync.ranks > 1:
            absent = self.sync.filled_in()
            shared = self.sync.stepped(window.inputs) if self.sync.same_parameters else []
            present = [float(id(parameter) not in absent) for parameter in shared]
            ours = float(self.target.digest(self.options) & 0xFFF) if shared else 0.0
            local = [*total.tolist(), *count.tolist()]
            values = self.sync.sum([*local, ours, ours * ours, *present])
            total, count = column(values[: len(local)], total.device).chunk(2)
            digests, squares, *counts = values[len(local) :]
            if squares * self.sync.ranks != digests * digests:  # equal only of equal numbers
                raise RankError(OTHER_SETTINGS)
            for parameter, made in zip(shared, counts, strict=True):
                if made == 0:
                    parameter.grad = None
        # A number that is not finite makes the sum so: one test instead of two.
        is_valid = (total.sum() + count.sum()).isfinite() & (count.max() > 0)
        if window.known is not None and window.known.keys() == set(names):
            known = column([window.known[name] for name in names], count.device)
            is_valid &= torch.isclose(count, known, rtol=1e-6, atol=0.0).all()
        divisor = torch.ones_like(count[0]) if window.has_terms else count.max()
        normalise = 1.0 / (divisor * window.seed) / window.loss_scale
        return Sums(total, count, is_valid, normalise)

    def _warn_of_clamped_units(self, totals: Sequence[float], units: Sequence[float]) -> None:
        """Warn of a micro-batch whose loss is exactly 0 over 1 unit: its units may be clamped."""
        pairs = zip(totals, units, strict=False)
        if self._warns_of_clamped and (0.0, 1.0) in pairs and max(units) > 1:
            self._warns_of_clamped = False
            _log.warning(_CLAMPED, max(units))

    def join(self, known: Mapping[str, float] | None = None) -> Step:
        """Take part in a window of the other ranks, without a micro-batch."""
        if known is not None and known.keys() != self._last_weights.keys():
            self._last_weights = dict.fromkeys(known, 1.0)  # the first window: only names matter
        self.sync.before_forwards()
        self.begin(0, known=known)
        return self.close()

    def _refuse_other_norm(self, norm: float) -> None:
        """Refuse an `on_gradient` that has made other gradients here than on another rank."""
        norm = norm if math.isfinite(norm) else math.inf
        both = torch.tensor([norm, -norm], dtype=torch.float64, device=self.target.device)
        most, least = self.sync.largest(both).tolist()
        if not math.isclose(most, -least, rel_tol=1e-6):
            raise RankError(
                f"on_gradient= has made gradients of norm {most:g} on one rank and {-least:g} on "
                "another, so the models would drift apart: it must do the same on every rank "
                "(draw noise from a torch.Generator with one seed for all)"
            )

    def _update(self, loss: float, steps: bool, *, stepped: bool) -> None:
        """Step the optimizers, schedulers and EMA, or leave the gradients to the user."""
        if not steps:
            self.store.hand_over()
            return
        if not stepped:
            self.store.update()
        self.updates += 1
        self.schedules.step(loss)
        if self.target.ema is not None:
            self.target.ema.update_parameters(self.target.models[0])

    def _empty(self, window: OpenWindow) -> Step:
        if self.options.zero_units == "raise":
            raise EmptyWindowError(
                f"all {window.micro_batches} micro-batches of this window have zero units (every "
                "label is ignored or every weight is zero), so its mean does not exist: filter "
                "such batches, or pass close=wb.Close(zero_units='skip') to skip and count them"
            )
        self.skipped += 1
        return self._report(window, loss=math.nan, units=0.0, grad_norm=0.0, skipped="no units")

    def _report(self, window: OpenWindow, **found: Any) -> Step:
        return Step(
            update=self.updates,
            micro_batches=window.micro_batches,
            seconds=perf_counter() - window.started,
            loss_scale=window.loss_scale,
            **found,
        )

    def _nonfinite(
        self, window: OpenWindow, totals: Sequence[Sequence[float]], losses_finite: bool
    ) -> str:
        """Return the reason for skipping, or raise the error; the same on all ranks."""
        pairs = (zip(window.owners, values, strict=False) for values in totals)
        bad_ones = [owner for owner, total in chain(*pairs) if not math.isfinite(total)]
        culprit = min(bad_ones, default=None)
        scaled = self.target.scale is not None and self.target.scale.enabled
        if scaled and losses_finite:
            return f"gradients not finite at loss scale {window.loss_scale:g}"
        bad, where = "a loss that is not finite", "the losses are finite but the gradients are not"
        if self.calls_on_gradient:
            where += " (or on_gradient= has made them so)"
        if culprit is not None:
            on = f" on rank {self.sync.rank}" if self.sync.ranks > 1 else ""
            where = f"micro-batch {culprit + 1} of {window.micro_batches}{on} has {bad}"
        elif not losses_finite:
            where = f"{'another rank' if window.owners else 'the batch'} has {bad}"
        if self.options.nonfinite == "skip":
            return where
        raise NonFiniteError(
            f"update {self.updates + 1}: {where}. Nothing was updated: parameters and optimizer "
            "state are as before this window; pass close=wb.Close(nonfinite='skip') to skip and "
            "count such updates",
            micro_batch=culprit,
        )

    # ---------------------------------------------------------------- discard

    def discard(self) -> None:
        """Drop what the window holds. Parameters and optimizer state stay as they are."""
        self.store.discard()
        self.sync.discard()
        self.hooks.give_back()
        self.open = None

    # ------------------------------------------------------------------ state

    def state_dict(self, kind: str) -> dict[str, Any]:
        """Return what every object of windows saves (`kind`: its class): counters and generators.

        The model and the optimizer are saved by their own `state_dict`, as everywhere in torch.
        """
        target = self.target
        if self.open is not None:
            raise StateError(
                f"state_dict() in an open window (micro-batches so far: {self.now.micro_batches}): "
                "save where backward() or run() returned a Step (`if step is not None:`). A window "
                "that was interrupted is computed again, with the same update"
            )
        return {
            "format": _FORMAT,
            "kind": kind,
            "updates": self.updates,
            "skipped": self.skipped,
            "next_seed": self.next_seed,
            "scaler": None if target.scale is None else target.scale.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in target.schedulers],
            "ema": target.ema.state_dict() if isinstance(target.ema, nn.Module) else None,
            "random": capture_random(),
        }

    def load_state_dict(self, kind: str, state: dict[str, Any]) -> None:
        """Load `state_dict`; a StateError, with nothing changed, says that it is not of here."""
        if not isinstance(state, dict) or "format" not in state:
            raise StateError("this is not a state dict of wholebatch (it has no 'format')")
        if state["format"] != _FORMAT:
            raise StateError(
                f"state dict of format {state['format']}, this version reads format {_FORMAT}: "
                "use the version of wholebatch that wrote it"
            )
        if state["kind"] != kind:
            raise StateError(f"state dict of {state['kind']}: cannot be loaded into {kind}")
        target = self.target
        if (state["scaler"] is None) != (target.scale is None):
            raise StateError(
                "loss scaling differs: the state was saved "
                f"{'without' if state['scaler'] is None else 'with'} a scaler; use the same "
                "precision"
            )
        if len(state["schedulers"]) != len(target.schedulers):
            raise StateError(
                f"the state holds {len(state['schedulers'])} schedulers, and "
                f"{len(target.schedulers)} are here: pass the same ones"
            )
        if self.open is not None:
            self.discard()

        self._agreed = False
        self.updates, self.skipped = state["updates"], state["skipped"]
        self.next_seed = state["next_seed"]
        if target.scale is not None:
            target.scale.load_state_dict(state["scaler"])
        for scheduler, saved in zip(target.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.schedules.forget()
        if isinstance(target.ema, nn.Module) and state["ema"] is not None:
            target.ema.load_state_dict(state["ema"])
        restore_random(state["random"])


class HasWindow:
    """The base of objects that make windows: it counts their updates."""

    _window: Window

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._window.updates

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped
