"""Check the first window of your own loop for common mistakes.

Your own loop passes its losses, but runs the forwards itself. So only this is tested:

1. a loss of the whole batch (`wb.losses.info_nce`), by its type;
2. layers that no micro-batch can compute for the batch, by their type;
3. a mean given as a sum, or a sum as a mean, by the last reduction of the loss;
4. a mean that is divided by the number of steps, or scaled by a GradScaler; means whose units do
   not follow what they are means over (in windows 1, 2, 4, 8, ...);
5. a loss that compares samples: rows of the model's outputs linked by its second derivative;
6. a model whose samples act on each other, or whose forward changes state: its first call is made
   again on two parts.

`acc.run` and `WholeBatch` test the loss function itself, and `wb.verify` proves the whole update.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch.samples import flatten, readable_layout, tensors_of
from wholebatch.coupled.adds_up import UNTESTED, AdditivityResult, check_adds_up
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.coupling_layers import refused_by_type
from wholebatch.coupled.last_reduction import Reduction, last_reductions, step_division
from wholebatch.coupled.mean_units import MeanUnits, is_mean_times_units
from wholebatch.coupled.normalisation_layers import batchnorms, refuse_new_norms
from wholebatch.coupled.sample_runs import emptied
from wholebatch.errors import WindowError
from wholebatch.losses.loss import Loss, Terms, Units, check_units, refuse_in_parts, terms_of
from wholebatch.warn_user import warn_user
from wholebatch.window.autograd_graph import graph_nodes, refuse_freed_graph, transforms_active
from wholebatch.window.forward_state import in_backward
from wholebatch.window.window import is_tested_window

_log = logging.getLogger("wholebatch")

_MOST_OUTPUTS = 32
_MOST_ROWS = 1 << 13
_MOST_ELEMENTS = 1 << 24
_LINKED = 1e-6
_LOSS = "the loss"
_PROOF = "To test the whole loss function, give it to acc.run, or run wb.verify once"


def sum_or_mean(
    reductions: Sequence[Reduction], units: float, is_mean: bool
) -> AuditFinding | None:
    """Find a mean that is given as a sum, or a sum that is given as a mean (`is_mean`)."""
    terms = [term for term in reductions if term.count > 1 or not term.sizes]
    # One unit may be a sample, and the mean one over what it consists of: `doubtful` warns of it.
    if units <= 1 or not terms or len(terms) >= units:  # as many terms: one of each unit
        return None
    first, number = terms[0], f"{units:g}"
    if not is_mean and all(_is_mean(term, units) for term in terms):
        made = "a mean" if first.kind == "mean" else f"a mean, a sum divided by {number}"
        text = (
            f"total is {made}, and must be the sum over its units={number}: its "
            'gradient would be too small. Take the sum (reduction="sum" in torch\'s losses), or '
            f"say that it is a mean: backward(mean=..., units={_over(first, units)})"
        )
        return AuditFinding(_LOSS, first.function, "mean", text)
    if is_mean and all(map(_is_summed_loss, terms)):
        text = (
            f"mean is a sum, and must be the mean over its units={number}: its "
            f"gradient would be too large. Pass it as a sum, backward(total, units={number}), or "
            "take the mean"
        )
        return AuditFinding(_LOSS, first.function, "sum", text)
    return None


def _is_mean(term: Reduction, units: float) -> bool:
    """True for a mean, or a sum divided by its units, that no factor makes a sum again."""
    if any(scale.operation == "multiplied" and scale.by > 1 for scale in term.scales):
        return False
    by_units = any(math.isclose(scale.by, units, rel_tol=4e-3) for scale in term.scales)
    # Of [units, units] losses, the division may be by the features; by 2, it may be of two terms.
    is_divided = by_units and units > 2 and term.count != units * units
    return term.kind == "mean" or (term.kind == "sum" and is_divided)


def _over(term: Reduction, units: float) -> str:
    """Return what a mean is over, as the advice gives it."""
    if term.labels is None or term.labels == units:
        return f"{units:g}"
    return f"{term.labels:g}), which is what it is a mean over (not {units:g}"


def _is_summed_loss(term: Reduction) -> bool:
    """True for a plain sum by one of torch's loss functions; other sums may be weighted means."""
    return term.kind == "sum" and not term.node.startswith("Sum") and not term.scales


def linked_rows(loss: Tensor, units: float, outputs: Iterable[Tensor]) -> AuditFinding | None:
    """Find samples that the loss compares: the gradient of one row depends on another row.

    `outputs` are those of the models in this micro-batch, with a row for each sample.

    Row i is linked with row j if the second derivative of the loss by both is not zero. If k rows
    are linked with a row, the loss of n rows has n / k independent parts, and needs as many units.
    """
    outputs = [one for one in outputs if _can_be_differentiated(one, units)]
    outputs = [one for one in outputs if not _is_below_a_batchnorm(one, outputs)]
    if units <= 1 or not outputs:
        return None
    between = graph_nodes([loss], {one.grad_fn for one in outputs})
    if any(isinstance(node, BackwardCFunction) for node in between):
        return None  # A custom autograd function may change what it has saved.
    hooks = [one._backward_hooks for one in outputs]  # Fabric refuses a backward that is not its
    try:
        with emptied(hooks), torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
            made = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            used = [(o, g) for o, g in zip(outputs, made, strict=True) if g is not None]
            for size in {len(output) for output, _ in used}:
                for row in (0, size // 2):
                    for rows, linked in _linked_with(row, size, used).items():
                        if linked and rows / linked < min(units, rows):
                            return _comparison(linked, rows, units)
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return None
    return None


def _is_below_a_batchnorm(output: Tensor, others: Iterable[Tensor]) -> bool:
    """True if another output is computed from this one, through a BatchNorm that was allowed.

    That BatchNorm links the rows, not the loss.
    """
    for other in others:
        above = list(graph_nodes([other], {output.grad_fn} - {other.grad_fn}))
        leads = any(node is output.grad_fn for n in above for node, _ in n.next_functions)
        if leads and any("BatchNorm" in node.name() for node in above):
            return True
    return False


def _can_be_differentiated(output: Tensor, units: float) -> bool:
    """True for an output of a graph with a row for each sample."""
    return (
        output.grad_fn is not None
        and output.is_floating_point()
        and output.layout is torch.strided
        and 1 < len(output) <= _MOST_ROWS
        and output.numel() <= _MOST_ELEMENTS
        and not output.retains_grad
        # [time, samples], or the last states of a recurrent layer, [layers, samples, ...]
        and not (output.dim() > 1 and output.shape[1] == units != len(output))
        and not (output.dim() > 2 and output.shape[1] == units)
    )


def _linked_with(row: int, size: int, outputs: Sequence[tuple[Tensor, Tensor]]) -> dict[int, int]:
    """Return how many rows move the gradient of this row of the outputs with `size` rows.

    They are counted by the number of rows of the output that they are in.
    """
    own = [gradient[row] for output, gradient in outputs if len(output) == size]
    asked = torch.stack([_mixed(gradient) for gradient in own]).sum()
    if not asked.requires_grad:  # a loss that is linear in the outputs
        return {}
    tensors = [output for output, _ in outputs]
    moved = torch.autograd.grad(asked, tensors, retain_graph=True, allow_unused=True)
    rows = [one.nan_to_num().abs().reshape(len(one), -1) for one in moved if one is not None]
    found = [one.amax(1) for one in rows]
    largest = max((float(one.max()) for one in found), default=0.0)
    linked: dict[int, Tensor] = {}
    for one in found:
        above = one > _LINKED * largest
        linked[len(one)] = linked.get(len(one), torch.zeros_like(above)) | above
    return {size: int(which.sum()) for size, which in linked.items()}


def _mixed(row: Tensor) -> Tensor:
    """Return one number of a row's gradient, in which no two elements have the same weight."""
    places = torch.arange(row.numel(), device=row.device)
    wide = row.dtype if row.dtype is torch.float64 else torch.float32
    return (row.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()


def _comparison(linked: int, rows: int, units: float) -> AuditFinding:
    text = (
        f"this loss compares samples with each other: it links {linked} of the model's {rows} "
        f"output rows, and units={units:g} claims as many independent parts. Use WholeBatch with "
        "loss=wb.Coupled(encode, loss), which sees the whole batch; if several rows make one unit "
        "(pairs, lists), pass the number of pairs or lists as units="
    )
    return AuditFinding(_LOSS, "comparison", "compared", text)


def doubtful(reductions: Sequence[Reduction], units: float, is_mean: bool) -> str | None:
    """Return what to ask about a loss that is right or wrong by what its numbers mean."""
    for term in reductions:
        factor = term.scales[0].by if term.scales else 0.0
        is_scale = math.isfinite(factor) and factor >= 256 and math.frexp(factor)[0] == 0.5
        if is_scale and term.scales[0].operation == "multiplied" and factor != units:
            begin = f"the loss is multiplied by {factor:g}"
            return (
                f"{begin}, a power of two: if GradScaler.scale(loss) does so, give the loss "
                "itself, and the scaler as close=wb.Close(scaler=scaler), which scales, unscales "
                f"and updates it. If it is a weight, nothing is wrong; {_silenced(begin)}"
            )
    terms = [term for term in reductions if term.count > 1 or not term.sizes]
    if units == 1 and not is_mean and terms and all(map(_is_mean_of_several, terms)):
        begin = f"total is a mean over {_count(terms[0])}, and units=1 takes them as one"
        return (
            f"{begin}. If this is a mean over the samples or labels of a micro-batch, pass their "
            "number: backward(mean=..., units=n). If all of it is one sample, nothing is wrong; "
            f"{_silenced(begin)}"
        )
    return None


def _is_mean_of_several(term: Reduction) -> bool:
    """True for a mean over more than one label, or over rows of losses without labels."""
    if any(scale.operation == "multiplied" and scale.by > 1 for scale in term.scales):
        return False
    if term.labels is not None:
        return term.labels > 1
    return term.kind == "mean" and len(term.sizes) > 0 and term.sizes[0] > 1


def _count(term: Reduction) -> str:
    if term.labels is not None:
        return f"{term.labels:g} labels"
    return f"{term.count} numbers"


def _silenced(begin: str) -> str:
    return f'warnings.filterwarnings("ignore", "{begin}") silences this warning'


_watching: WeakSet[LoopChecks] = WeakSet()


@contextmanager
def unwatched() -> Iterator[None]:
    """Take the hooks of all checks off their models, so that a graph can be made of a forward."""
    watching = list(_watching)
    for checks in watching:
        checks.take_hooks_off()
    try:
        yield
    finally:
        for checks in watching:
            checks.watch(calls=checks.tests_calls)


class LoopChecks:
    """Runs the checks in a loop's first window.

    ```python
    checks = LoopChecks(models, audit=audit)
    checks.begin_window(number)           # a BatchNorm may be new
    checks.watch()                        # before the first forward of a window: hooks on models
    checks.check(total, units)            # before every backward; or mean=
    checks.end_micro_batch()              # after the last backward of a micro-batch
    checks.end_window(micro_batches)      # the window is over: the hooks go
    ```

    Models whose forwards run collectives (FSDP, DeepSpeed) are watched with `calls=False`.
    """

    def __init__(self, models: Iterable[nn.Module], *, audit: bool = True) -> None:
        self._models, self._audits = list(models), audit
        self.active = audit
        """False after the first window: then only types and units of losses are checked."""
        self.tests_units = False
        """True in windows 1, 2, 4, 8, ...: units of means are compared with the graph."""
        self._norms = {norm for model in self._models for _, norm in batchnorms(model)}
        self._handles: list[Any] = []
        self._depth = 0
        self._paused = False
        self.tests_calls = True
        self._outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        self._calls: list[AuditFinding] = []
        self._called: set[nn.Module] = set()
        self._reductions: list[tuple[Sequence[Reduction], Units | None]] = []
        self._means = MeanUnits()
        self._leaves: dict[int, tuple[ref[Tensor], int]] = {}
        self._doubted = self._warned = False
        self._stopped = False

    def begin_window(self, number: int) -> None:
        """Refuse a BatchNorm that is new in a model; `number` counts windows from 1."""
        is_tested = self._audits and is_tested_window(number)
        self.tests_units = is_tested and not self._stopped
        self._means.begin_window()
        self._leaves.clear()
        if is_tested:
            refuse_new_norms(self._models, self._norms)

    def watch(self, *, calls: bool = True) -> None:
        """Note the outputs of the models; with `calls`, test the first call of each."""
        if not self.active or self._handles:
            return
        self.tests_calls = calls
        _watching.add(self)
        for module in {m for model in self._models for m in model.modules()}:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            enter, leave = _Hook(self._enter), _Hook(self._leave)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]

    def check(
        self,
        total: Tensor | Loss | Terms | None = None,
        units: Units = 1,
        *,
        mean: Tensor | None = None,
        in_parts: bool = True,
        steps: int = 0,
    ) -> None:
        """Refuse a loss with one of the mistakes that are tested.

        Give what the entry point was given: the sum over `units`, a wb.Loss, or `mean=`. `in_parts`
        is False where this micro-batch is all of its window and there is one rank: any loss is
        right. `steps` is the number of micro-batches of the window, if it is known.
        """
        if not self._audits or not in_parts:
            return
        refuse_in_parts(total)
        if not self.active and not self.tests_units:
            return
        if isinstance(total, Loss | Terms):
            given = [(term.total, term.units) for term in terms_of(total).values()]
        else:
            given = [(one, units) for one in (total if mean is None else mean,) if one is not None]
        if self.tests_units and self.tests_calls:
            self._refuse_moved([loss for loss, _ in given])
        for loss, of in given:
            if loss.grad_fn is not None:  # else no loss at all, which is refused elsewhere
                try:
                    reductions, number = last_reductions(loss), float(check_units(of))
                    if self.active:
                        self._check(loss, reductions, check_units(of), mean is not None, steps)
                    is_mean = mean is not None or is_mean_times_units(reductions, number)
                    if is_mean and self.tests_units:
                        self._means.add(reductions, number)
                except RuntimeError as error:
                    refuse_freed_graph(error)
                    raise

    def _refuse_moved(self, losses: Iterable[Tensor]) -> None:
        """Refuse losses of a parameter that was written since an earlier loss of the window.

        The window's own parameters are watched elsewhere; this one belongs to another model, whose
        optimizer has stepped.
        """
        for node in graph_nodes(losses):
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is None:
                continue
            known, version = self._leaves.setdefault(id(leaf), (ref(leaf), leaf._version))
            if known() is leaf and version != leaf._version:
                raise WindowError(
                    f"a parameter of shape {tuple(leaf.shape)} that this loss depends on has "
                    "changed in the middle of the window (another model's optimizer has stepped), "
                    "so the micro-batches would not see the same weights. Give wb.over all "
                    "accumulators of the loop, or each model a loop of its own; discard() drops "
                    "what this window holds"
                )

    def _check(
        self,
        loss: Tensor,
        reductions: Sequence[Reduction],
        units: Units,
        is_mean: bool,
        steps: int,
    ) -> None:
        number = float(units)
        self._reductions.append((reductions, None if is_mean else units))
        found = [
            *(layer for model in self._models for layer in refused_by_type(model)),
            sum_or_mean(reductions, number, is_mean),
            linked_rows(loss, number, self._outputs),
            # One unit owns all rows of its micro-batch: only state can be wrong there.
            *(one for one in self._calls if number != 1 or one.kind in ("state", "outside")),
        ]
        AdditivityResult(tuple(one for one in found if one is not None)).refuse()
        doubt = doubtful(reductions, number, is_mean)
        if doubt is not None and not self._doubted:
            self._doubted = True
            warn_user(doubt)
        self._warn_of_division(steps)

    def _warn_of_division(self, steps: int) -> None:
        """Warn of a loss that is scaled by 1 / `steps`, once."""
        for terms, units in self._reductions:
            found = step_division(terms, units, [steps])
            if found is not None and not self._warned:
                self._warned = True
                warn_user(found)

    def end_micro_batch(self) -> None:
        """Forget the outputs of a micro-batch, after its backwards."""
        self._outputs.clear()
        self._means.end_micro_batch()

    def end_window(self, micro_batches: int = 0) -> None:
        """End the first window; warn of losses divided by its number of micro-batches."""
        if self.active:
            self.active = False
            self.take_hooks_off()
            self._outputs.clear()
            self._warn_of_division(micro_batches)
            self._reductions.clear()

    def stop(self) -> None:
        """Take the hooks off the models, and check nothing more but the type of losses."""
        self.active = self.tests_units = False
        self._stopped = True
        self.take_hooks_off()
        self._outputs.clear()

    def take_hooks_off(self) -> None:
        """Take the hooks off the models until `watch` is called again."""
        _watching.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make calls of the models that are not those of the loop."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    # -------------------------------------------------------------- hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._paused or transforms_active():
            return
        is_call = self._depth == 0 and torch.is_grad_enabled() and not in_backward()
        if is_call and self.tests_calls:
            self._test_call(module, args, kwargs)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._paused or transforms_active():
            return
        self._depth -= 1
        given = [tensor for tensor in tensors_of((args, kwargs)) if tensor.dim()]
        if self._depth or in_backward() or not given or not torch.is_grad_enabled():
            return
        made = (one for one in tensors_of(output) if one.dim() and one.requires_grad)
        self._outputs += [one for one in made if len(one) == len(given[0])]

    def _test_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the first call of a model on two parts of its samples, before the call itself."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        inside = set(inner.modules())
        meets = any(isinstance(m, nn.SyncBatchNorm | DistributedDataParallel) for m in inside)
        if not self._called.isdisjoint(inside) or not inner.training or meets:
            return
        with self.paused():
            result = parts_of_call(inner, args, kwargs)
            if not result.conclusive:
                return
            self._called |= inside
            mixes = any(one.kind not in ("state", "outside") for one in result.findings)
            doubt = _other_dimension(inner, args, kwargs) if mixes else None
        if doubt is None:
            self._calls += result.findings
        elif doubt:
            begin = f"{type(inner).__name__}: its output for one row of the first dimension changed"
            warn_user(
                f"{begin} when another row changed, and {doubt}. If the rows are samples, micro-"
                "batches do not make the update of the whole batch: run wb.verify. If they are "
                f"not, nothing is wrong; {_silenced(begin)}"
            )


def parts_of_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AdditivityResult:
    """Compare the outputs of a call with those of two parts of its samples, forward only.

    The first tensor gives the number of samples. Other tensors are given whole if they have another
    number of rows, and are no indices: those of a graph's edges would point to rows that are left
    out. The module is left as it was.
    """
    others = _of_other_rows(args, kwargs)
    if others is None or any(one.dim() and not one.is_floating_point() for one in others):
        return AdditivityResult(conclusive=False)

    def run(few: Any) -> dict[str, Tensor]:
        given, named = few
        rows = len(next(tensor for tensor in tensors_of(few) if tensor.dim()))
        leaves, _ = flatten(module(*given, **named))
        made = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)}
        return {name: one for name, one in made.items() if one.dim() and len(one) == rows}

    layout = readable_layout((tuple(args), dict(kwargs)), None, ())
    try:
        made = check_adds_up(module, run, layout, gradients=False, outputs=True, name="forward")
        if any(found.kind in UNTESTED for found in made.findings):
            # The first dimension may be another one than that of the samples.
            return AdditivityResult(conclusive=False)
        return made
    except Exception as error:  # It cannot be called with fewer samples.
        _log.debug("a call of %s was not tested: %r", type(module).__name__, error)
        return AdditivityResult()


def _of_other_rows(args: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the tensors with other rows than the first has; None if that has fewer than two."""
    given = tensors_of((args, kwargs))
    rows = next((len(tensor) for tensor in given if tensor.dim()), 0)
    if rows < 2:
        return None
    return [tensor for tensor in given if not tensor.dim() or len(tensor) != rows]


def _other_dimension(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return why the first dimension may not be that of the samples; "" if it is not, or None."""
    by_time = next(
        (name for name, m in module.named_modules() if getattr(m, "batch_first", True) is False),
        None,
    )
    if by_time is not None:
        if _adds_up_along_second(module, args, kwargs):
            return ""
        name = f"its layer {by_time}" if by_time else "it"
        return f"{name} has batch_first=False (torch's default), so it takes this dimension as time"
    return "its tensors have different numbers of rows" if _of_other_rows(args, kwargs) else None


def _adds_up_along_second(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a call is the same for the parts of its second dimension, which holds the samples."""
    columns = next((one.shape[1] for one in tensors_of((args, kwargs)) if one.dim() > 1), 0)

    def turned(value: Any) -> Any:
        has_samples = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == columns
        return value.transpose(0, 1) if has_samples else value

    compared: list[int] = []  # empty where the call fails

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *given: Any, **named: Any) -> dict[str, Tensor]:
            rows = len(given[0] if given else next(iter(named.values())))
            back = [_turned_back(one, rows) for one in given]
            made = self.inner(*back, **{k: _turned_back(one, rows) for k, one in named.items()})
            outputs = {
                str(number): one if len(one) == rows else one.transpose(0, 1)
                for number, one in enumerate(tensors_of(made))
                if one.shape[:2].count(rows) == 1  # else either may be that of the samples
            }
            compared.append(len(outputs))
            return outputs

    given = [turned(one) for one in args]
    result = parts_of_call(Turned(), given, {name: turned(one) for name, one in kwargs.items()})
    return result.conclusive and not result.findings and any(compared)


def _turned_back(value: Any, rows: int) -> Any:
    is_turned = isinstance(value, Tensor) and value.dim() > 1 and len(value) == rows
    return value.transpose(0, 1) if is_turned else value


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)  # checks that nobody holds any more keep no outputs

    def __call__(self, *given: Any) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(*given)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*given: Any) -> None:
    """Stand for a hook in a copy of the model."""
