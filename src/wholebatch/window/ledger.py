"""The ledger of a run: it begins windows, adds micro-batches to them, closes and counts them.

What a window is, and how its seed makes every backward exact, is in `window.py`; what happens to
its gradients in `close.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import OTHER_SETTINGS
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    RankError,
    UnsupportedError,
    WindowError,
)
from wholebatch.losses.loss import (
    SINGLE,
    Loss,
    Term,
    Terms,
    Units,
    check_terms,
    is_nothing,
    terms_of,
)
from wholebatch.window.autograd_graph import refuse_freed_graph, refuse_reentrant
from wholebatch.window.close import (
    DeferredHooks,
    OnGradient,
    Reading,
    Store,
    check_counts,
    close_gradients,
    column,
    power_of_two_near,
    read_scalars,
    scalar_on,
)
from wholebatch.window.close_options import CloseOptions
from wholebatch.window.model_and_optimizer import Schedules, Target
from wholebatch.window.observer import Observer
from wholebatch.window.window import MicroBatch, Step, Window, is_tested_window, refuse_units

observers: list[Any] = []
"""Called when a window begins, closes and ends (`wb.watch` reads its units at the close)."""


def _first_seed(units: Units, group: Group) -> float | Tensor:
    """Return a power of two near 1/units of the first micro-batch, the same on every rank."""
    if isinstance(units, Tensor):  # stays on the device: no synchronisation
        largest = group.largest(units.double()).clamp(min=1.0)
        return torch.exp2(-torch.log2(largest).round())
    return power_of_two_near(1.0 / max(group.largest_number(float(units)), 1.0))


HALF_DONE = "the last backward of this window failed half way and left part of its gradients behind"
PART_FAILED = (
    "a backward of a micro-batch in parts (more=True) was refused, so it is not known whether the "
    "next one belongs to it"
)


class Ledger:
    """Makes one window after the other: begin, add, close.

    Attributes:
        open: The window that is open, or None.
        micro_batches: The micro-batches of the window that have ended.
        micro: The micro-batch that has begun and not ended; None between two.
        broken: The reason why the window must be discarded; None if it may go on.
        updates: Updates made so far.
        skipped: Windows that made no update.
        next_seed: The seed of the next window whose units are not counted before; None if its first
            micro-batch decides.
        leaves_gradients: True if the last window has left its gradients in `.grad`.
        observer: What watches the windows; it can raise or warn, and changes nothing.
    """

    def __init__(
        self,
        target: Target,
        options: CloseOptions,
        sync: Sync,
        store: Store | None = None,
        on_gradient: OnGradient | None = None,
        on_open: Callable[[], object] | None = None,
    ) -> None:
        clips = sync.clip_norm is not None
        self.target = target
        self.options = replace(options, clip_norm=sync.clip_norm) if clips else options
        self.sync = sync
        self.store = Store(target, self.options, sync) if store is None else store
        self.store.options = self.options
        self.hooks = DeferredHooks(on_gradient, target.named_parameters)
        self.schedules = Schedules(target.schedulers)
        self.observer = Observer()
        self.open: Window | None = None
        self.micro_batches: list[MicroBatch] = []
        self.micro: MicroBatch | None = None
        self._beside: list[MicroBatch] = []  # losses that belong to no single micro-batch
        self._weights: dict[str, float] = {}  # of the window's terms
        self.broken: str | None = None
        self.on_open = on_open
        self._has_opened = False  # True if `on_open` was called for the window
        self.are_units_given = False
        self.updates = 0
        self.skipped = 0
        self.next_seed: float | None = None
        self.leaves_gradients = not target.steps
        self._groups = 0  # of parameters, for which the options were checked
        self._agreed = False  # True if all ranks are known to train the same parameters
        self._last_weights: Mapping[str, float] = {SINGLE: 1.0}
        self._last_seed: tuple[str, float, Tensor] | None = None  # nearly always it is the same

    # ------------------------------------------------------------------ begin

    def before_window(self, *, is_late: bool = False) -> None:
        """Call `on_open`, once per window; refuse it if the first forward has run (`is_late`)."""
        if self.on_open is None or self._has_opened:
            return
        if is_late:
            raise WindowError(
                "close=wb.Close(on_open=...) in a plain loop, whose first forward has run already: "
                "loop with acc.over(loader) or acc.window(micro_batches), or call the function "
                "yourself before each window"
            )
        self._has_opened = True
        self.on_open()

    def begin(
        self,
        units: Units = 1,
        *,
        known: Mapping[str, float] | None = None,
    ) -> Window:
        """Open a window.

        Args:
            units: Those of its first micro-batch, for the seed of the first window.
            known: All units by term, counted over the window and all ranks.
        """
        if self.open is not None:
            raise WindowError("begin() on an open window: close or discard it first")
        groups = self.target.groups()
        if len(groups) != self._groups:  # a group was added
            self.options.check(self.target.optimizers)
            self._groups = len(groups)
        inputs = [parameter for group in groups for parameter in group]
        stepped = self.sync.stepped(inputs)
        self.store.refuse_stray(inputs)
        if stepped is not inputs:
            self.store.refuse_stray(stepped)
        self.schedules.refuse_stepped()
        if not inputs:
            raise WindowError("every parameter of the optimizer is frozen: nothing to train")
        scale = self.target.scale
        scaling = 1.0 if scale is None else scale.value()
        self.target.refuse_hooks(stepped)
        if not self._agreed:  # before gradients are added up
            digest, parameters = self.target.digest(self.options), self.target.all_parameters()
            self.sync.refuse_other_ranks(digest, parameters.values())
        self._agreed = True
        self.store.begin(inputs)
        self.sync.begin(inputs)
        self.hooks.take(stepped)
        window = Window(
            groups,
            known,
            self._seed(units, known),
            averaged_by=self.sync.averaged_by,
            scaling=scaling,  # a scaler's own scale may move before the close
            loss_scale=scaling if scale is not None and scale.is_undone_at_close else 1.0,
        )
        self.open, self._last_seed = window, None
        for observer in observers:
            observer.window_began(self)
        return window

    def _seed(self, units: Units, known: Mapping[str, float] | None) -> float | Tensor:
        """Return the seed of a window, a power of two: 16 bits do not round it."""
        if known is None:
            return self.next_seed or _first_seed(units, self.sync.group)
        if known.keys() != {SINGLE}:  # of terms, each of which has its own
            return 1.0
        return power_of_two_near(1.0 / (known[SINGLE] or 1.0))

    def keep_seed(self) -> None:
        """Begin the window that is open again with the seed that all ranks have agreed on."""
        if self.open is not None and self.next_seed is None:
            self.next_seed = read_scalars([self.open.seed])[0]

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
    def current(self) -> Window:
        """The open window, where there must be one."""
        assert self.open is not None, "no window is open"
        return self.open

    @property
    def inputs(self) -> list[nn.Parameter]:
        """The parameters of the open window; none if no window is open."""
        return [] if self.open is None else self.open.inputs

    @property
    def known(self) -> Mapping[str, float] | None:
        """All units of the open window by term, if they were counted before."""
        return None if self.open is None else self.open.known

    def count_from(
        self, updates: int, skipped: int | None = None, next_seed: float | None = None
    ) -> None:
        """Go on after so many updates: a trainer counts them, or a state was loaded (`skipped`)."""
        self.updates = updates
        if skipped is not None:
            self.skipped, self.next_seed = skipped, next_seed
            self._agreed = False  # the ranks compare their settings again

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
        kinds = map(type, self.target.optimizers)
        sparse = any(issubclass(kind, torch.optim.SparseAdam) for kind in kinds)
        return self.sync.has_whole_gradient and not sparse

    # -------------------------------------------------------------------- add

    def seed_of(self, name: str, total: Tensor, weight: float, *, counts: bool = True) -> Tensor:
        """Return the number that the backward of this total starts from."""
        last = self._last_seed
        if last is not None and last[:2] == (name, weight) and counts:
            seed = last[2]
            if seed.dtype is total.dtype and seed.device == total.device:
                return seed
        value = self.current.seed_of(name, weight) if counts else 0.0
        seed = scalar_on(total.device, value, total.dtype)
        if counts:
            self._last_seed = (name, weight, seed)
        return seed

    def add(self, loss: Loss | Terms, *, last: bool = False, counts: bool = True) -> None:
        """Run the backward of a micro-batch's loss into the gradients; no device is waited for.

        `last`: it is the window's last backward, which reduces. One that does not count only takes
        part in the collectives of the other ranks.
        """
        if counts:
            self.observer.loss_is_known(loss)
        terms, window = terms_of(loss), self.open
        if isinstance(loss, Terms):
            check_terms(self.known, terms)
        elif window is None:
            self.begin(loss.units)
        elif window.has_terms:
            raise LossError(
                f"units= counts the terms {sorted(self.known or ())}, but the loss has no named "
                "terms: return wb.Loss.terms({...}) with the same names"
            )
        micro = self._with_part(terms) if counts else None
        totals, seeds = [], []
        for name, term in terms.items():
            totals.append(term.total)
            seeds.append(self.seed_of(name, term.total, term.weight, counts=counts))
        self.backward(totals, seeds, last=last)
        if micro is None:
            self._weights.update((n, t.weight) for n, t in terms.items() if n not in self._weights)
            self._beside.append(MicroBatch.without_weight(terms))
        self.micro = micro

    def begin_micro_batch(self) -> MicroBatch:
        """Begin a micro-batch, unless one has begun; return it."""
        if self.micro is None:
            self.micro = MicroBatch(len(self.micro_batches))
        return self.micro

    def _with_part(self, terms: Mapping[str, Term]) -> MicroBatch:
        """Return the micro-batch with a backward of these terms; refuse other weights."""
        for name, term in terms.items():
            first = self._weights.setdefault(name, term.weight)
            if term.weight != first:
                raise LossError(
                    f"the weight of term {name!r} is {first:g} in one micro-batch of this window "
                    f"and {term.weight:g} in another: it belongs to the whole window; multiply the "
                    "totals by what differs between samples"
                )
        return self.begin_micro_batch().with_part(terms)

    def record(self, terms: Mapping[str, Term], *, of_the_window: bool = False) -> None:
        """Record a loss whose gradients are added elsewhere: by a graph, or in a second pass."""
        micro = self._with_part(terms)
        if of_the_window:  # it belongs to no single micro-batch
            self._beside.append(replace(micro, index=-1))
            self.micro = None
        else:
            self.micro = micro

    @property
    def has_losses(self) -> bool:
        """True if the open window holds a loss."""
        return bool(self.all_micro_batches)

    @property
    def held(self) -> int:
        """The number of micro-batches that the open window holds, without those that were empty."""
        return sum(bool(micro.parts) for micro in self.micro_batches)  # read at exit, too

    @property
    def all_micro_batches(self) -> list[MicroBatch]:
        """What the window holds: ended micro-batches, the open one, and losses beside them."""
        last = [] if self.micro is None else [self.micro]
        return [m for m in (*self.micro_batches, *last, *self._beside) if m.parts]

    def backward(
        self,
        totals: Sequence[Tensor],
        seeds: Sequence[Tensor],
        also: Sequence[Tensor] = (),
        *,
        last: bool = False,
    ) -> None:
        """Add the gradients of totals, times their seeds, into the parameters and into `also`."""
        sync, inputs = self.sync, self.current.inputs
        # Torch leaves it out in silence where none of the inputs lies before it in the graph.
        if sync.runs_alone and not self.micro_batches and is_tested_window(self.number):
            refuse_reentrant(totals)
        try:
            with sync.backward(inputs, last=last):
                # A mean over no units adds nothing, and its backward may divide by zero.
                if any(map(is_nothing, totals)) and sync.runs_alone:
                    pairs = [p for p in zip(totals, seeds, strict=True) if not is_nothing(p[0])]
                    totals, seeds = [total for total, _ in pairs], [seed for _, seed in pairs]
                if totals:
                    sync.run_backward(totals, seeds, [*inputs, *also] if also else inputs)
        except BaseException as error:
            self.broken = self.broken or HALF_DONE  # some gradients are in, others are not
            refuse_freed_graph(error)
            if isinstance(error, RuntimeError) and sync.adds_to_parameters:
                refuse_reentrant(totals)
            raise

    def end_micro_batch(self) -> None:
        """End a micro-batch after its last backward; one without a backward has a place, too."""
        micro = self.begin_micro_batch()
        self.micro_batches.append(micro)
        self.micro = None
        if micro.parts:
            self.observer.gradients_are_added(self.inputs)

    # ------------------------------------------------------------------ close

    def close(
        self,
        *,
        steps: bool = True,
        while_waiting: Callable[[], object] | None = None,
    ) -> Step:
        """Add up, decide, apply, report (see `window.py`). The window is over in any case.

        Without `steps` the gradients stay in `.grad`, for the user to step with and to clear.
        `while_waiting()` is called where the host waits for the device.
        """
        handover = self.store.handover
        steps = steps and self.target.steps and (self.sync.owns_step or not handover.counts)
        self.leaves_gradients = not steps
        window, micro_batches = self.current, self.all_micro_batches
        try:
            self.refuse_broken()
            self.observer.window_closes()
            for observer in observers:
                observer.window_closes(self)
            filled_in = self.sync.reduce(window.inputs)
            # A rank without weights only joins the others.
            weights = self._weights or self._last_weights
            step = self._decided(window, micro_batches, weights, filled_in, while_waiting)
            if step.units:
                self._apply(step, steps=steps)
                self.next_seed = power_of_two_near(1.0 / step.units)
                self._last_weights = weights
            self.updates += step.skipped is None and (steps or handover.counts)
            self.skipped += step.skipped is not None
            return replace(step, update=self.updates, seconds=perf_counter() - window.started)
        finally:
            self.discard()
            # An autocast around the whole loop would go on with casts of the old weights.
            torch.clear_autocast_cache()

    def _decided(
        self,
        window: Window,
        micro_batches: Sequence[MicroBatch],
        weights: Mapping[str, float],
        filled_in: Collection[int],
        while_waiting: Callable[[], object] | None,
    ) -> Step:
        """Add up, normalise and clip, read the numbers, and say what is to become of the window.

        `weights` are those of the terms. `filled_in` are the ids of the parameters that had no
        gradient here before the reduction.
        """
        names, device, sync = sorted(weights), self.target.device, self.sync
        of_term = {name: [m for m in micro_batches if name in m.units] for name in names}
        totals = [column([t for m in of_term[n] for t in m.totals(n)], device) for n in names]
        units = [column([m.units[name] for m in of_term[name]], device) for name in names]
        total = torch.stack([each.sum() for each in totals])
        # Units that are not valid on this rank must stop the update of every rank.
        count = torch.stack([torch.where(each >= 0, each, math.nan).sum() for each in units])
        if sync.ranks > 1:
            total, count = self._over_ranks(window, total, count, filled_in)
        # A number that is not finite makes the sum so: one test instead of two.
        is_valid = (total.sum() + count.sum()).isfinite() & (count.max() > 0)
        if window.known is not None and window.known.keys() == set(names):
            known = column([window.known[name] for name in names], count.device)
            is_valid &= torch.isclose(count, known, rtol=1e-6, atol=0.0).all()
        divisor = torch.ones_like(count[0]) if window.has_terms else count.max()
        normalise = 1.0 / (divisor * window.seed) / window.loss_scale
        holders = sync.holders(window.groups)
        closed = close_gradients(
            holders, normalise, is_valid, self.options, self.hooks, total_norm=sync.norm
        )
        reading = Reading(*closed, total, count, *totals, *units)
        if while_waiting is not None:
            while_waiting()
        (norm,), (clip,), (may_step,), sum_of, units_of, *columns = reading.wait()
        for name, units_of_term in zip(names, columns[len(names) :], strict=True):
            refuse_units(units_of_term, of_term[name])
        units_in_all = max(units_of)
        if math.isnan(units_in_all):
            raise LossError("another rank has units that are negative or not finite")
        number = sum(micro.index >= 0 for micro in micro_batches)
        if units_in_all == 0.0:
            self._refuse_no_units(number)
            return Step(self.updates, math.nan, 0.0, 0.0, number, 0.0, skipped="no units")
        if window.known is not None:
            check_counts(window.known, dict(zip(names, units_of, strict=True)))
        if norm == 0.0:
            self.store.refuse_nothing()
        if self.hooks.calls and sync.ranks > 1:
            self._refuse_other_norm(norm)
        skipped = None
        if not may_step:
            places = [m.index for name in names for m in of_term[name] for _ in m.totals(name)]
            values = [value for each in columns[: len(names)] for value in each]
            bad = [p for p, value in zip(places, values, strict=True) if not math.isfinite(value)]
            skipped = self._not_finite(window, bad, number, all(map(math.isfinite, sum_of)))
        means = {
            name: total_of / units_of_term if units_of_term else 0.0
            for name, total_of, units_of_term in zip(names, sum_of, units_of, strict=True)
        }
        return Step(
            update=self.updates,
            loss=math.fsum(weights[name] * means[name] for name in names),
            units=units_in_all,
            grad_norm=norm,
            micro_batches=number,
            seconds=0.0,
            clip=clip if may_step else 1.0,
            loss_scale=window.loss_scale,
            terms=means if names != [SINGLE] else {},
            skipped=skipped,
        )

    def _over_ranks(
        self, window: Window, total: Tensor, count: Tensor, filled_in: Collection[int]
    ) -> tuple[Tensor, Tensor]:
        """Return totals and counts summed over the ranks.

        With them go a digest of this rank's settings, and which parameters have a gradient here:
        one that has none on any rank keeps none, as for the undivided batch.
        """
        sync = self.sync
        shared = sync.stepped(window.inputs) if sync.peers is sync.group else []
        present = [float(id(parameter) not in filled_in) for parameter in shared]
        ours = float(self.target.digest(self.options) & 0xFFF) if shared else 0.0
        local = [*total.tolist(), *count.tolist()]
        values = sync.group.sum([*local, ours, ours * ours, *present])
        total, count = column(values[: len(local)], total.device).chunk(2)
        digests, squares, *counts = values[len(local) :]
        if squares * sync.ranks != digests * digests:  # equal only of equal numbers
            raise RankError(OTHER_SETTINGS)
        for parameter, ranks_with_gradient in zip(shared, counts, strict=True):
            if ranks_with_gradient == 0:
                parameter.grad = None
        return total, count

    def _apply(self, step: Step, *, steps: bool) -> None:
        """Step the optimizers, schedulers and the average; without `steps`, leave the gradients.

        A window that is skipped changes nothing but the loss scale.
        """
        target, is_valid = self.target, step.skipped is None
        if is_valid and not steps:
            self.store.hand_over()
        elif is_valid:
            self.store.update()
            self.schedules.step(step.loss)
            if target.ema is not None and target.averaged is not None:
                target.ema.update_parameters(target.averaged)
        if target.scale is not None:
            target.scale.update(finite=is_valid)
        self.sync.after_update()

    def _refuse_no_units(self, micro_batches: int) -> None:
        if self.options.zero_units == "raise":
            raise EmptyWindowError(
                f"all {micro_batches} micro-batches of this window have zero units (every label is "
                "ignored or every weight is zero), so its mean does not exist: filter such "
                "batches, or pass close=wb.Close(zero_units='skip') to skip and count them"
            )

    def _refuse_other_norm(self, norm: float) -> None:
        """Refuse an `on_gradient` that has made other gradients here than on another rank."""
        norm = norm if math.isfinite(norm) else math.inf
        both = torch.tensor([norm, -norm], dtype=torch.float64, device=self.target.device)
        most, least = self.sync.group.largest(both).tolist()
        if not math.isclose(most, -least, rel_tol=1e-6):
            raise RankError(
                f"on_gradient= has made gradients of norm {most:g} on one rank and {-least:g} on "
                "another, so the models would drift apart: it must do the same on every rank "
                "(draw noise from a torch.Generator with one seed for all)"
            )

    def _not_finite(
        self, window: Window, culprits: Sequence[int], of: int, are_finite: bool
    ) -> str:
        """Return the reason for skipping, or raise the error; the same on all ranks.

        `culprits` are the micro-batches whose losses are not finite, `of` so many.
        """
        culprit = min((index for index in culprits if index >= 0), default=None)
        scale, sync = self.target.scale, self.sync
        if scale is not None and scale.enabled and are_finite:
            return f"gradients not finite at loss scale {window.loss_scale:g}"
        bad, where = "a loss that is not finite", "the losses are finite but the gradients are not"
        if self.hooks.calls:
            where += " (or on_gradient= has made them so)"
        if culprit is not None:
            on = f" on rank {sync.rank}" if sync.ranks > 1 else ""
            where = f"micro-batch {culprit + 1} of {of}{on} has {bad}"
        elif not are_finite:
            where = f"{'the batch' if culprits else 'another rank'} has {bad}"
        if self.options.nonfinite == "skip":
            return where
        raise NonFiniteError(
            f"update {self.updates + 1}: {where}. Nothing was updated: parameters and optimizer "
            "state are as before this window; pass close=wb.Close(nonfinite='skip') to skip and "
            "count such updates",
            micro_batch=culprit,
        )

    def join(self, known: Mapping[str, float] | None = None) -> Step:
        """Take part in a window of the other ranks, without a micro-batch."""
        if known is not None and known.keys() != self._last_weights.keys():
            self._last_weights = dict.fromkeys(known, 1.0)  # the first window: only names matter
        self.before_window()
        self.sync.before_forwards()
        self.begin(0, known=known)
        return self.close()

    def discard(self) -> None:
        """Drop what the window holds. Parameters and optimizer state stay as they are."""
        self.store.discard()
        self.sync.discard()
        self.hooks.give_back()
        self.open = self.micro = self.broken = None
        self.micro_batches, self._beside, self._weights = [], [], {}
        self.are_units_given = self._has_opened = False
        self.observer.gradients_are_added(())

    def refuse_broken(self) -> None:
        """Refuse to go on with a window that holds a part of a micro-batch."""
        if self.broken is not None:
            raise WindowError(f"{self.broken}: call discard() before going on")


def refuse_no_grad(call: str, instead: str) -> None:
    """Refuse a call where autograd makes no gradients; `instead` says what to do."""
    if not torch.is_grad_enabled():
        raise WindowError(
            f"{call} under torch.no_grad() or torch.inference_mode(), where there are no "
            f"gradients: {instead}"
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


class HasLedger:
    """The base of objects that make windows: it counts their updates."""

    _ledger: Ledger

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._ledger.updates

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._ledger.skipped
