"""Look at a loop whose forwards are not ours, in its first window.

A stream gives its losses and keeps its forwards to itself. What it does can still be seen: hooks on
the models see the first forwards, the first call of a model can be made again on a few samples, and
the graph of a loss tells how it was made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wholebatch.batch.samples import flatten, layout_of, readable_layout, tensors_of
from wholebatch.compile.captured_state import Fingerprint, LookAgain, modules_in_sight, version_of
from wholebatch.coupled import loss_graph
from wholebatch.coupled.adds_up import LookResult, check_adds_up
from wholebatch.coupled.audit import refused_by_type
from wholebatch.coupled.causes import AuditFinding, outside_norm
from wholebatch.coupled.contrastive.losses import refuse_in_parts
from wholebatch.coupled.followed_tensor import FollowedTensor
from wholebatch.coupled.last_reduction import Reduction, find_step_division, last_reductions
from wholebatch.coupled.loop_variants import Dependence, LoopVariants, plain_autograd
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    known_norms,
    refuse_new_norms,
    running_buffers,
)
from wholebatch.coupled.sample_runs import local_collectives
from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, Terms, Units, check_units
from wholebatch.window.forward_state import ForwardState, in_backward
from wholebatch.window.window import graph_nodes, transforms_active

_log = logging.getLogger("wholebatch")

_MOST_OUTPUTS = 32
_READS = 3  # of divisors: one may be the size of a micro-batch, and not of the next


_TIME = (
    ". It may read its input as [time, samples, ...], where this loss has [samples, time, ...]: "
    "give it batch_first=True, or transpose what it is given"
)


_PENALTY = (
    "a penalty on the weights is added to the sum of every micro-batch, with a factor of %g for %g "
    "units. That is right if it is %g for each unit. If it is meant for the whole batch, it is "
    "counted once per micro-batch. Write penalty * weight * units, or give mean="
)
_BENT = (
    "the sum or mean of a micro-batch is clamped. It was not changed here. A window in which it is "
    "changed is not that of the whole batch: clamp the loss of each sample, before the mean"
)


class StreamLook:
    """Refuses, in a loop's first window, what cannot be the update of the whole batch.

    That is a mean given as a sum, or a sum as a mean; a loss that compares samples; a model that
    lets samples act on each other by more than a BatchNorm, or whose forward moves state.

    ```python
    look = StreamLook(models, audit=audit)
    look.watch()                          # before the first forward of a window: hooks on models
    look.at_backward(total, units)        # before every backward; or at_backward(mean=, units=)
    look.done()                           # after the last backward of every micro-batch
    look.end_window(micro_batches)        # the window is over
    ```

    Before the first call of each model, that call is made on a few samples and their halves.
    `at_backward` reads the graph of the loss, once for every kind of node that losses end with. In
    the first micro-batch it also differentiates that graph twice (hooks of the user's on tensors in
    it run once more) and raises what was found. Then the hooks are taken off, at the end of the
    window in any case. After that `active` is False. Losses such as `wb.losses.info_nce` are still
    refused, and so are means of other shapes whose elements have another weight than before.

    Models whose forwards run collectives (FSDP, DeepSpeed) must not be watched. A window that is
    all of the batch (one micro-batch, one rank) need not be.
    """

    def __init__(self, models: Iterable[nn.Module], *, audit: bool = True) -> None:
        self._models = list(models)
        self._called: set[nn.Module] = set()  # in this micro-batch, with all modules below them
        self._judged: set[nn.Module] = set()
        self._found: list[AuditFinding] = []
        self._looking = False
        self._audits = audit
        self._norms = {norm for model in self._models for _, norm in batchnorms(model)}
        known_norms.update(self._norms)
        self.samples: int | None = None  # of a micro-batch, where a loader tells it
        # BatchNorms of others, and writes into their buffers and parameters so far. None before the
        # first micro-batch is done.
        self._outside: dict[nn.Module, tuple[int, int]] | None = None
        self._variants = LoopVariants()
        self._followed = False  # a micro-batch was followed, and judged
        self._prepared: str | None = None  # what was done to samples before the model was called
        self._again = LookAgain()
        self._kinds: set[tuple[type, bool]] = set()  # of the nodes that losses ended with
        self._reductions: list[tuple[Sequence[Reduction], Units | None]] = []  # of the first losses
        self._warned_of_division = False
        self._weights: dict[Any, loss_graph.TermWeight] = {}  # of terms
        self.shapes: set[Any] = set()  # of losses that were looked at
        self._rows: int | None = None  # of the last call of a model that was seen
        self._calls: list[_Call] = []  # of this micro-batch
        self._units = 0.0  # of it: the last that were not 0
        self._reads = 0
        self._handles: list[Any] = []
        self._depth = 0
        self._outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        self._looked = False
        self.over = not audit  # True once there was a look: nothing follows
        self.active = audit  # False after the first window: nothing more is to be seen

    def begin_window(self) -> None:
        """Look again if a model is not as it was (see `LookAgain`)."""
        self._weights = {key: one for key, one in self._weights.items() if "mean" not in key}
        if self._again.is_due():
            refuse_new_norms(self._models, self._norms)
            self.over = self._looked = False
            self._judged.clear()

    def watch(self) -> None:
        """Keep the outputs of the models until they were looked at."""
        if self.over or self._handles:
            return
        self.active, self._outside, self._followed = True, None, False
        self._found += [found for model in self._models for found in refused_by_type(model)]
        for module in {m for model in self._models for m in model.modules()}:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            enter, leave = _Hook(self._enter), _Hook(self._leave)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]

    def begin_micro_batch(self, batch: Any, samples: int | None) -> None:
        """Note what a loader gave, and how many samples it says that this is."""
        self.samples = samples
        if self._handles:
            self._variants.start(_tensors_of(batch))

    def at_backward(
        self,
        total: Tensor | Loss | Terms | None = None,
        units: Units = 1,
        *,
        mean: Tensor | None = None,
        in_parts: bool = True,
        place: object = 0,
        steps: int = 0,
    ) -> None:
        """Refuse this loss if its graph shows that micro-batches do not add up to the whole batch.

        Give what the door was given: the sum over `units`, a wb.Loss, or `mean=`. `in_parts` is
        False where this micro-batch is all of its window and there is one rank: any loss is right.
        `place` tells the losses of one micro-batch apart; the first is at 0. `steps` is the number
        of micro-batches of the window, if it is known before the window ends.
        """
        if not self._audits:
            return
        self._variants.stop()
        if in_parts:
            refuse_in_parts(total)
        if isinstance(total, Terms):
            for name, term in total.by_name.items():
                where: dict[str, Any] = {"place": (place, name), "steps": steps}
                self.at_backward(term.total, term.units, in_parts=in_parts, **where)
                self._calls.clear()  # Each term has units of its own, and was announced.
            return
        if isinstance(total, Loss):
            units, total = total.units, total.total
        scalar = total if mean is None else mean
        kind = type(getattr(scalar, "grad_fn", None))
        if kind is type(None):
            return  # no loss at all: refused elsewhere
        assert scalar is not None
        is_mean = mean is not None
        if (kind, is_mean) not in self._kinds:
            check = loss_graph.check_mean if is_mean else loss_graph.check_sum
            check(scalar, check_units(units))
            if float(units) > 1:  # of one unit, the mean is the sum
                self._kinds.add((kind, is_mean))
        if in_parts:
            self._units = float(check_units(units)) or (self._units if place else 0.0)
            self._compare_weights((kind, place), scalar, is_mean=is_mean)
        if self._reads < _READS:
            self._reads += 1
            summed = None if is_mean else check_units(units)
            self._reductions.append((last_reductions(scalar), summed))
            self._refuse_division(self._reductions[-1:], steps)
        if in_parts and self._outside:
            self._refuse_outside_norm(scalar)
        if self._handles and in_parts:
            number = float(units)
            # One unit owns all rows of its micro-batch: only state can be wrong there.
            kinds = {"state", "outside", "frequency"}
            if number != 1:
                kinds = {finding.kind for finding in self._found}
                if "time" in kinds and not self._is_batch_first(scalar, number):
                    kinds.remove("time")
            LookResult(tuple(f for f in self._found if f.kind in kinds)).refuse(off="audit=False")
            if not self._looked:
                self._refuse_comparisons(scalar, number)
                for output in self._outputs:
                    loss_graph.check_hooks(output)
            self._refuse_dependence(scalar, units, is_mean=is_mean)

    def _refuse_division(
        self, reductions: Iterable[tuple[Sequence[Reduction], Units | None]], steps: int
    ) -> None:
        """Refuse a mean that is divided by the number of steps; warn of its inverse once."""
        for terms, units in reductions:
            found = find_step_division(terms, units, [steps])
            if found is not None and (found.is_sure or not self._warned_of_division):
                self._warned_of_division = True
                found.report()

    def _compare_weights(self, loss: Any, scalar: Tensor, *, is_mean: bool) -> None:
        """Refuse a loss whose samples count for more than those of an earlier micro-batch."""
        found = loss_graph.check_parts(scalar, self._units, is_mean=is_mean, rows=self._rows)
        for (of, *place), weight in found.items():
            if of == "mean" and not self.active:
                continue  # Nobody looked at the other micro-batches of this window.
            key = (loss, of, *place)
            if of == "bent" and key not in self._weights:
                _log.warning(_BENT)
            first = self._weights.setdefault(key, weight)
            if weight.contradicts(first, of):
                loss_graph.refuse_weight(of, first.value, weight.value, self._units)
            if of == "regulariser" and weight.count != first.count:  # It grows with the units.
                self._weights[key] = replace(first, may_differ=True)

    def _is_batch_first(self, scalar: Tensor, units: float) -> bool:
        """True if the first dimension of a model's outputs is the samples, as far as that shows."""
        shapes = {one.shape[:2] for one in self._outputs if one.dim() > 1}
        counts = (units, self.samples)
        if any(rows in counts and columns not in counts for rows, columns in shapes):
            return True
        return loss_graph.links_columns(scalar, list(self._outputs), units)

    def _refuse_dependence(self, scalar: Tensor, units: Units, *, is_mean: bool) -> None:
        """Refuse samples that depend on each other by what the graph of the loss does not show."""
        number, rows = float(check_units(units)), self._rows or 0
        shapes = [one.shape for one in self._outputs]
        is_clear = self.samples == rows or not any(
            loss_graph.may_be_time_first(shape, number) for shape in shapes
        )
        if not is_clear or self._is_called_by_sample(number):
            return  # The rows may be steps in time, or parts of one sample.
        found = self._variants.dependence(scalar, units, rows, is_mean=is_mean)
        # Two samples may stay where they are when a loop shuffles them.
        self._followed = self._followed or (found is not False and rows > 3)
        if not isinstance(found, Dependence):
            return
        if found.through == "outputs":
            self._raise_compared("it has numbers that were computed from their outputs (detached)")
        if found.norm is not None:
            norm = outside_norm("the loop", found.norm, "(the loss)")
            LookResult((norm,)).refuse(off="audit=False")
        what = "an input of the model" if found.of == "input" else "the loss of a sample"
        self._warn_of(f"{what} depends on the data of other samples, by what is computed")

    def _is_called_by_sample(self, units: float) -> bool:
        """True if the rows of the outputs are parts of one sample: the model is called for each."""
        return len(self._calls) >= units > 1 and self._rows != units

    def _warn_of(self, found: str) -> None:
        _log.warning(
            "%s over the micro-batch: if that is done there (advantages, mixup), and not "
            "within groups of samples that stay together, do it over the whole batch, before "
            "the loop",
            found,
        )

    def _refuse_outside_norm(self, scalar: Tensor) -> None:
        """Refuse a BatchNorm of another module that has run since the first backward.

        One that the loop trains by itself, and not in this loss, may be of another task.
        """
        ran = {n: was for n, was in (self._outside or {}).items() if _writes(n)[0] != was[0]}
        inputs = {getattr(node, "variable", None) for node in graph_nodes([scalar])} if ran else ()
        for norm, was in ran.items():
            parameters = list(norm.parameters())
            trained = _writes(norm)[1] != was[1] or any(p.grad is not None for p in parameters)
            if not trained or any(one in inputs for one in parameters):
                found = outside_norm("the loop", type(norm).__name__, "(the loss)")
                LookResult((found,)).refuse(off="audit=False")

    def done(self) -> None:
        """End a micro-batch, after its backwards: one that was looked at is enough."""
        if self.active and self._outside is None:
            norms = (norm for module in modules_in_sight() for _, norm in batchnorms(module))
            self._outside = {n: _writes(n) for n in norms if n.training and n not in known_norms}
        if self._handles:
            self._clear_calls()
            if self._looked and self._followed:
                self._remove_hooks()

    def end_window(self, micro_batches: int = 0) -> None:
        """End the first window; refuse means divided by its number of micro-batches."""
        self.active = False
        self._outside = {}
        self._refuse_division(self._reductions, micro_batches)
        self._reductions.clear()
        if self._handles:
            self._remove_hooks()
        penalties = {k: weight for k, weight in self._weights.items() if "regulariser" in k}
        unclear = [w for w in penalties.values() if not w.may_differ and w.count > 1]
        if unclear and micro_batches > 1:
            factor, units = unclear[0].value, unclear[0].count
            _log.warning(_PENALTY, factor, units, factor / units)
            self._weights |= {k: replace(w, may_differ=True) for k, w in penalties.items()}
        if self.over and self._audits and not self._again.seen:
            self._again.seen = [Fingerprint(model, _do_nothing) for model in self._models]

    def leave_loop(self) -> None:
        """Follow the loop no more: it has ended."""
        self._variants.stop(clear=True)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._clear_calls()
        self.over = True

    def _clear_calls(self) -> None:
        self._variants.stop(clear=True)
        for held in (self._outputs, self._called, self._calls):
            held.clear()

    def _refuse_comparisons(self, scalar: Tensor, units: float) -> None:
        if units <= 0 or not self._outputs or self._is_called_by_sample(units):
            return
        linked = loss_graph.linked_samples(scalar, list(self._outputs), units)
        if not linked:
            self._looked = linked is not None
            if self._looked and units > 1:
                found = loss_graph.normalised_over_samples(scalar, list(self._outputs), units)
                found = self._prepared or found
                if found is not None:
                    self._warn_of(found)
            return
        shown = ", ".join(map(str, linked[:5])) + (", ..." if len(linked) > 5 else "")
        self._raise_compared(
            f"it links {len(linked)} of the model's output rows ({shown}), and units={units:g} "
            "says that it is a sum over so many independent parts"
        )

    def _raise_compared(self, how: str) -> NoReturn:
        raise LossError(
            f"this loss compares samples with each other: {how}. Of a micro-batch it is not a part "
            "of the whole batch's loss. What to do: WholeBatch with loss=wb.Coupled(encode, loss), "
            "which sees the whole batch; where several rows make one unit (pairs, lists), give "
            "units= their number; audit=False accepts it of each micro-batch by itself"
        )

    # -------------------------------------------------------------- hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._looking or transforms_active():
            return
        if self._depth == 0 and not in_backward():
            self._variants.enter(_tensors_of((args, kwargs)))
        if self._depth == 0 and torch.is_grad_enabled() and not in_backward():
            self._look_at(module, args, kwargs)
        self._depth += 1

    def _look_at(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make the call on a few samples first, unless a buffer of an open graph could change."""
        inner: nn.Module = getattr(module, "module", module) if _is_ddp(module) else module
        known = not self._called.isdisjoint(module.modules()) or module in self._judged
        self._called.update(module.modules())
        given = _tensors_of((args, kwargs))
        if any(map(loss_graph.is_standard, given)):
            self._prepared = "an input of the model has mean 0 and deviation 1"
        collective = any(isinstance(m, nn.SyncBatchNorm) or _is_ddp(m) for m in inner.modules())
        if known or not inner.training or collective:
            return
        with self._not_counting():
            found = look_at_call(inner, args, kwargs)
        if found is not None:
            self._judged.add(module)
            self._found += found

    def at_function(self, model: nn.Module, run: Callable[[Any], Any], given: Any) -> None:
        """Refuse a loss function whose micro-batches do not add up: it is run on some samples."""
        layout = readable_layout(given, None, ())
        if not self._handles or layout is None or layout.size < 2:
            return
        try:
            with self._not_counting(), local_collectives():
                result = check_adds_up(model, run, layout)
        except Exception as error:  # most often the function's own, and the call will raise it
            _log.warning("not tested if micro-batches add up to the whole batch: %r", error)
            return
        result.refuse()
        self._judged.update(model.modules() if result.conclusive else ())

    @contextmanager
    def _not_counting(self) -> Iterator[None]:
        """Make calls that the hooks do not count."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._looking or transforms_active():
            return
        self._depth -= 1
        if self._depth or in_backward():
            return
        given = _tensors_of((args, kwargs))
        if not given or output is None:
            return
        rows, made = len(given[0]), _tensors_of(output)
        if torch.is_grad_enabled():
            self._rows = rows
            self._calls.append(_Call(given, [tensor.grad_fn for tensor in made]))
            self._outputs += [one for one in made if one.requires_grad and len(one) == rows]
        if (torch.is_grad_enabled() or module.training) and not self._variants.on:
            self._variants.start()
        self._variants.leave(made, rows)


class _Call:
    """A call of a model: what it was given, the nodes of its outputs, and who counted its units."""

    def __init__(self, given: Iterable[Tensor], nodes: Iterable[Any]) -> None:
        self._held = list(given)  # so that no other tensor is made in their place
        self.given = [
            (
                tensor.data_ptr() if type(tensor) in (Tensor, FollowedTensor) else id(tensor),
                tensor.shape,
                version_of(tensor),
            )
            for tensor in self._held
        ]
        self.nodes, self.units = {node for node in nodes if node is not None}, 0.0


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)  # a look that nobody holds any more keeps no outputs

    def __call__(self, *given: Any) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(*given)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*given: Any) -> None:
    """Stand for a hook in a copy of the model."""


def _writes(norm: nn.Module) -> tuple[int, int]:
    """Return how often its running statistics were written, and its parameters."""
    held = running_buffers(norm).values(), norm.parameters()
    runs, steps = (sum(map(version_of, tensors)) for tensors in held)
    return runs, steps


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


# --------------------------------------------------------------------- a call, made again


def look_at_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[AuditFinding, ...] | None:
    """Return what couples the samples of this call, and the state that it moves.

    None: the call has one sample, and another may tell more. Every tensor that is given must have
    the same number of samples in its first dimension; else nothing is found. What is not found
    where the second dimension is read as the samples is of kind "time": the tensors may have been
    [time, samples, ...]. The module is left as it was.
    """
    given = _tensors_of((args, kwargs))
    if given and all(len(tensor) == 1 for tensor in given):
        return None
    if _get_current_dispatch_mode_stack():  # It would see our calls: a selective checkpoint.
        return ()
    with plain_autograd():
        found = _looked(module, args, kwargs, dim=0).findings
        if found:
            turned = _looked(module, args, kwargs, dim=1)
            if turned.conclusive and not turned.findings:
                return tuple(replace(f, kind="time", advice=f.advice + _TIME) for f in found)
        return found


def _looked(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, dim: int
) -> LookResult:
    """Make the call on a few samples, which lie in dimension `dim`, and on their halves."""
    sizes = {t.shape[dim] if t.dim() > dim else 0 for t in _tensors_of((args, kwargs))}
    if len(sizes) != 1 or max(sizes) < 2:
        return LookResult(conclusive=False)

    def call(few: Any) -> dict[str, Tensor]:
        args, kwargs = _swapped(few, dim)
        leaves, _ = flatten(_swapped(module(*args, **kwargs), dim))
        return {x.name: x.value for x in leaves if isinstance(x.value, Tensor) and x.value.dim()}

    def run(few: Any) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in call(few).items() if name in rows}

    batch = _swapped((tuple(args), dict(kwargs)), dim)
    try:
        rows = _outputs_with_rows(module, call, batch, max(sizes))
        layout = readable_layout(batch, None, ())
        with local_collectives():
            return check_adds_up(module, run, layout, outputs=True, name="forward")
    except Exception as error:  # it cannot be called so: with fewer samples, or time as samples
        _log.debug("a call of %s was not looked at: %r", type(module).__name__, error)
        return LookResult(conclusive=False)


@torch.no_grad()
def _outputs_with_rows(
    module: nn.Module, call: Callable[[Any], Mapping[str, Tensor]], batch: Any, size: int
) -> set[str]:
    """Return the outputs that have a row for each sample, for two numbers of samples."""
    layout = layout_of(batch, batch_size=size)
    found = []
    for count in (2, 3) if size > 2 else (1, 2):  # of one sample, a BatchNorm knows no variance
        with ForwardState(module, results=True):
            made = call(layout.take(list(range(count))))
        found.append({name for name, tensor in made.items() if len(tensor) == count})
    return found[0] & found[1]


def _swapped(tree: Any, dim: int) -> Any:
    """Return the tensors of a structure with dimensions 0 and `dim` exchanged."""
    if dim == 0:
        return tree
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    return structure.build(
        [v.transpose(0, dim) if isinstance(v, Tensor) and v.dim() > dim else v for v in values]
    )


def _tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a structure that have a dimension; none if it cannot be read."""
    return [tensor for tensor in tensors_of(tree) if tensor.dim()]
