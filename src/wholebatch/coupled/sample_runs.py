"""Run some samples of a batch together and in parts, with the tolerance for rounding.

Every run begins from the same state, with the same random numbers for each sample (`HeldDraws`). Of
its gradient a few numbers are kept. `Tolerance` tells rounding from another loss.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from wholebatch.batch.samples import Layout, Leaf, flatten
from wholebatch.coupled.held_draws import HeldDraws
from wholebatch.coupled.normalisation_layers import (
    BatchNorm,
    batchnorms,
    fixed_statistics,
    uses_batch_statistics,
)
from wholebatch.losses.loss import OfTheBatch, Units, as_loss, is_nothing, terms_of
from wholebatch.window.autograd_graph import graph_nodes, refuse_reentrant
from wholebatch.window.close import read_scalars
from wholebatch.window.forward_state import ForwardState, Key
from wholebatch.window.precision import SIXTEEN_BIT
from wholebatch.window.reachable_objects import own_generators
from wholebatch.window.replaced_attributes import emptied

SCALE = 1024.0  # of backwards: one that clips, or takes a sign, is not linear in it
_LINEAR = 3  # so many numbers of a digest are linear in the gradient; the last is its norm


class Uncheckable(Exception):
    """This loss cannot be checked."""


# --------------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class SampledTerm:
    """One term of the loss of some samples; rounding is relative to `size`, what was summed."""

    total: float = 0.0
    units: float = 0.0
    size: float = 0.0
    weight: float = 1.0
    dtype: torch.dtype = torch.float32
    units_rounding: float = 0.0
    """The rounding step of the units, if they are floating point."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """The terms of a loss, the digests of its gradient, and the state that the run left behind."""

    terms: Mapping[str, SampledTerm]
    digests: Tensor | None
    after: ForwardState

    @property
    def total(self) -> float:
        """The terms together, each by its weight."""
        return math.fsum(term.total * term.weight for term in self.terms.values())

    @property
    def units(self) -> float:
        return math.fsum(term.units for term in self.terms.values())

    @property
    def is_finite(self) -> bool:
        """True if the loss is finite; if not, the step will tell."""
        return math.isfinite(self.total)

    def only(self, names: Collection[str]) -> SampleRun:
        """Return the run with these terms alone."""
        return replace(self, terms={name: self.terms[name] for name in names})

    def drew_alike(self, others: Iterable[SampleRun]) -> bool:
        """True if all have drawn equally often from Python's and NumPy's generators."""
        states = (other.after for other in others if other.after is not self.after)
        return all(after.draws_same(self.after, host=True) for after in states)


def spread_rows(size: int, count: int) -> list[int]:
    """Return the places of `count` samples, spread evenly from the first of `size` to the last.

    A batch may be sorted: by length, or labelled samples first. Neighbours are alike then, and a
    mean over the wrong units adds up.

    >>> spread_rows(22, 8)
    [0, 3, 6, 9, 12, 15, 18, 21]
    """
    return [place * (size - 1) // max(count - 1, 1) for place in range(count)]


def fewer_tokens(layout: Layout) -> Layout | None:
    """Return the samples with half of their tokens, which take half of the memory.

    Tokens are whole numbers of shape [samples, tokens]; all leaves of that length are cut.
    """
    values = [leaf.value for leaf in layout.leaves if leaf.batched]
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 1]
    lengths = [t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    if not lengths or lengths[0] < 4:
        return None

    def cut(leaf: Leaf) -> Leaf:
        value = leaf.value
        if leaf.batched and isinstance(value, Tensor) and value.shape[1:2] == (lengths[0],):
            return replace(leaf, value=value[:, : lengths[0] // 2])
        return leaf

    return replace(layout, leaves=tuple(map(cut, layout.leaves)))


class ChosenSamples:
    """Samples spread over a batch, for a model and a function that runs it.

    `run(batch)` returns a Loss, Terms or a tensor of per-unit losses; with `outputs=True` whatever
    tensors have a row for each sample. Findings call it by `name`. Use it within `testing()`, which
    leaves no trace. With `graph=False` runs make no graph.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Any], Any],
        layout: Layout,
        count: int,
        *,
        graph: bool,
        outputs: bool = False,
        name: str = "the loss function",
        owned: nn.Module | None = None,
    ) -> None:
        self.model, self.run, self.layout = model, run, layout
        self.graph, self.name = graph, name
        self._choose(count)
        self.reads_outputs = outputs
        # ZeRO-3 holds a parameter empty until its first forward.
        self.named = {n: p for n, p in model.named_parameters() if _is_plain(p) and p.numel()}
        self.parameters = [(n, p) for n, p in self.named.items() if p.requires_grad]
        self._data = [(p, p.data) for p in self.named.values()]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._generators = own_generators(model, run)
        # All runs get the same tensors that are not split: a running mean that a forward moves.
        whole = (leaf.value for leaf in layout.leaves if not leaf.batched)
        tensors = [t for t in whole if isinstance(t, Tensor) and not t.requires_grad]
        self._shared = [(tensor, tensor.clone()) for tensor in tensors]
        self.start = ForwardState(model, results=True, generators=self._generators)
        self.weights = self.weight_norms()
        self.draws = HeldDraws()
        self._draws_nothing = self._changes_nothing = self._may_have_drawn = False
        self._is_clean = True
        self.moved: list[Key] = []
        """The buffers and attributes that a run of all samples has changed."""
        self.called = CalledModules(model, owned)
        self.tolerance = Tolerance(1e-3, 1e-5, 1e-6, 3e-3)  # until a run tells the precision
        self._norms = [n for n in batchnorms(owned or model) if uses_batch_statistics(n[1])]
        self._seeds: dict[str, float] = {}

    def _choose(self, count: int) -> None:
        """Choose so many samples, and where they are cut.

        Uneven parts: two equal ones may have equally many labels, and then any mean adds up. Not
        two even numbers: means of the hardest half of each may be that of the whole by chance. So
        3 : 5 of eight samples, and of six only five, 2 : 3.
        """
        self.count = count = 5 if count == 6 else count
        cut = 2 if count == 5 else max(1, 3 * count // 8)
        self.cut = cut + (cut % 2 == 0 and count % 2 == 0)
        self.rows = spread_rows(self.layout.size, count)
        """The places of the samples in the batch."""

    def halved(self) -> ChosenSamples:
        """Return half of the samples; of two or three, half of their tokens if they have any."""
        fewer = copy.copy(self)
        fewer.draws, fewer._seeds = HeldDraws(), {}
        if self.count < 4:
            fewer.layout = fewer_tokens(self.layout) or self.layout
        else:
            fewer._choose(self.count // 2)
        return fewer

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Allow runs within it; restore at its end what they have changed."""
        eagerly: AbstractContextManager[Any] = nullcontext()
        if "torch._dynamo" in sys.modules:  # the test is not to make modules compile again
            eagerly = torch.compiler.set_stance("force_eager")
        try:
            fixed = fixed_statistics(self._norms)
            with warnings.catch_warnings(), eagerly, fixed:
                warnings.simplefilter("ignore")
                yield
        finally:
            self._is_clean = False
            self.restore()

    def restore(self) -> None:
        """Restore the state that was found; every run starts there."""
        for parameter, is_trained in self._trained:  # a loss function may freeze one
            if parameter.requires_grad is not is_trained:
                parameter.requires_grad_(is_trained)
        for tensor, value in self._shared:
            if not tensor.equal(value):  # a BatchNorm's write counts as no new version
                tensor.copy_(value)
        if not self._is_clean:
            self.start.restore(random=self._may_have_drawn)
            for parameter, data in self._data:
                if parameter.data_ptr() != data.data_ptr():  # `parameter.data = …` in a forward
                    parameter.data = data
        self._is_clean, self._may_have_drawn = False, True  # until the run shows something else

    @torch.no_grad()
    def weight_norms(self) -> dict[str, float]:
        """Return the norm of every parameter, to see if a forward changes it."""
        norms = read_scalars(torch._foreach_norm([*self.named.values()])) if self.named else []
        return dict(zip(self.named, norms, strict=True))

    def whole(self) -> SampleRun:
        """Run all samples, and record what they draw.

        Recording slows every operation down, so a model without dropout runs plainly first.
        """
        self._draws_nothing = self._changes_nothing = False
        run = None
        if not any(map(_is_dropout, self.model.modules())):
            self.restore()
            with self.called:
                run = self._run(range(self.count), backward=self.graph)
            self.draws.held = self._draws_nothing = self.start.draws_same(run.after, host=False)
        if run is None or not self._draws_nothing:
            self.restore()
            with self.called, self.draws.recording():
                run = self._run(range(self.count), backward=self.graph)
        self.tolerance = Tolerance.of(self, run)
        self.moved = self.start.moved(run.after)
        self._is_clean = self._changes_nothing = not self.moved and not self._may_have_drawn
        return replace(run, after=self.start) if self._changes_nothing else run

    def part(
        self,
        start: int,
        stop: int,
        *,
        prepare: Callable[[], None] = lambda: None,
        backward: bool = False,
        scale: float = 1.0,
    ) -> SampleRun:
        """Run the samples `start` to `stop`, with what they drew in the whole.

        `prepare()` may change the state before. The backward starts from `scale` times what that
        of the whole starts from; its digests are divided by it.
        """
        self.restore()
        prepare()
        backward = backward and self.graph
        held = self.draws.serving(to_the_end=backward)
        with nullcontext() if self._draws_nothing else held:
            return self._run(range(start, stop), backward=backward, scale=scale)

    def of_rows(self, rows: Sequence[int]) -> SampleRun:
        """Run these samples in this order, forward only, with what they drew in the whole."""
        self.restore()
        with nullcontext() if self._draws_nothing else self.draws.serving(to_the_end=False):
            return self._run(rows)

    def _run(self, rows: Sequence[int], *, backward: bool = False, scale: float = 1.0) -> SampleRun:
        # Copies, so that a function that changes its batch in place does not change the user's.
        batch = self.layout.take([self.rows[row] for row in rows])
        with torch.set_grad_enabled(self.graph):
            result = self.run(batch)
            pairs = _output_terms(result, rows) if self.reads_outputs else _loss_terms(result)
        del result
        terms = {name: term for name, (term, _) in pairs.items()}
        if not self._seeds:
            self._seeds = {n: t.weight / t.units if t.units else t.weight for n, t in terms.items()}
        digests = None
        totals = {
            name: total
            for name, (_, total) in pairs.items()
            if total.requires_grad and not is_nothing(total)
        }
        if backward and totals and self.parameters:
            digests = self._digests(totals, scale)
        del pairs, totals
        if self._changes_nothing:  # Reading the state takes longer than a small forward.
            self._is_clean, self._may_have_drawn = True, False
            return SampleRun(terms, digests, self.start)
        after = ForwardState(self.model, results=True, generators=self._generators)
        self._may_have_drawn = not (
            self.start.draws_same(after, host=True) and self.start.draws_same(after, host=False)
        )
        return SampleRun(terms, digests, after)

    def _digests(self, totals: Mapping[str, Tensor], scale: float) -> Tensor:
        # fp16 knows nothing below 6e-8: its gradients are scaled up, and all by the same.
        factor = 1024.0 if self.called.fp16 else scale
        seeds = [
            torch.tensor(self._seeds.get(name, 1.0) * factor, dtype=total.dtype).to(total.device)
            for name, total in totals.items()
        ]
        parameters = [parameter for _, parameter in self.parameters]
        digests = gradient_digests(self.model, parameters, list(totals.values()), seeds) / factor
        sizes = [self.weights[n] / max(p.numel(), 1) ** 0.5 for n, p in self.parameters]
        # Divided by the parameter's size it is like a sum of random signs, as the others are.
        digests[:, 2] /= torch.tensor(sizes, dtype=torch.float64).clamp_min(1e-30)
        return digests


def _output_terms(result: Any, of: Sequence[int]) -> dict[str, tuple[SampledTerm, Tensor]]:
    """Return tensors with a row for each sample as sums in which no two rows count alike.

    `of` are the numbers of the samples: they give a sample's row the same weight in every run.
    """
    terms = {}
    for leaf in flatten(result)[0]:
        rows = leaf.value
        if not (isinstance(rows, Tensor) and rows.dim() and rows.is_floating_point()):
            continue
        places = torch.arange(len(rows), device=rows.device, dtype=rows.dtype) + of[0]
        if len(rows) == len(of):
            places = torch.tensor(of, device=rows.device, dtype=rows.dtype)
        weighted = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
        columns = torch.arange(weighted.shape[1], device=rows.device)
        signs = ((columns * 2654435761 >> 7) % 2 * 2 - 1).to(rows.dtype)
        weighted = weighted * signs * (1 + 0.37 * places)[:, None]
        total, size = weighted.sum(), float(weighted.detach().norm())
        sampled = SampledTerm(float(total.detach()), float(len(rows)), size, 1.0, rows.dtype)
        terms[leaf.name] = (sampled, total)
    return terms


def _loss_terms(result: Any) -> dict[str, tuple[SampledTerm, Tensor]]:
    size = None
    if isinstance(result, Tensor) and result.dim() and result.is_floating_point():
        size = float(result.detach().abs().sum())
    loss = as_loss(result)
    if isinstance(loss, OfTheBatch):
        raise Uncheckable("a loss of the whole batch, which is refused in parts")
    terms = {}
    for name, term in terms_of(loss).items():
        total = float(term.total.detach())
        summed = abs(total) if size is None else size
        units, dtype = float(term.units), _narrowest(term.total)
        sampled = SampledTerm(total, units, summed, term.weight, dtype, _rounding(term.units))
        terms[name] = (sampled, term.total)
    return terms


def _rounding(units: Units) -> float:
    if isinstance(units, Tensor) and units.is_floating_point():
        return torch.finfo(units.dtype).eps
    return 0.0


def _narrowest(total: Tensor) -> torch.dtype:
    """Return float32 for a float64 loss that was computed in float32 at some place."""
    inputs = (m for node in graph_nodes([total]) for m in getattr(node, "_input_metadata", ()))
    narrow = total.dtype is torch.float64 and any(m.dtype is torch.float32 for m in inputs)
    return torch.float32 if narrow else total.dtype


def _is_dropout(module: nn.Module) -> bool:
    """True for a layer of torch that draws in training mode."""
    rates = (vars(module).get(name) for name in ("p", "dropout"))  # a parameter may be named p
    return module.training and any(isinstance(rate, float) and 0.0 < rate < 1.0 for rate in rates)


def _is_plain(parameter: nn.Parameter) -> bool:
    """True for an ordinary tensor of floating-point numbers: no subclass, nothing quantised."""
    wide = parameter.dtype in (torch.float64, torch.float32, *SIXTEEN_BIT)
    return wide and type(parameter.data) is Tensor and parameter.layout is torch.strided


class CalledModules:
    """Records whether modules compute in 16 bits, and a BatchNorm that is in no given model."""

    def __init__(self, model: nn.Module, owned: nn.Module | None = None) -> None:
        self._own = {id(module) for module in (owned or model).modules()}
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self.sixteen_bit = any(dtype in SIXTEEN_BIT for dtype in dtypes)
        self.fp16 = torch.float16 in dtypes
        self.float64 = bool(dtypes) and dtypes <= {torch.float64, torch.complex128}
        self.outside_norm: str | None = None

    def __enter__(self) -> CalledModules:
        self._hook = register_module_forward_pre_hook(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.sixteen_bit = True
                self.fp16 = self.fp16 or torch.get_autocast_dtype(kind) == torch.float16
        if isinstance(module, BatchNorm) and module.training and id(module) not in self._own:
            self.outside_norm = type(module).__name__


# --------------------------------------------------------------------- gradients


def gradient_digests(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    totals: Sequence[Tensor],
    seeds: Sequence[Tensor],
) -> Tensor:
    """Return four numbers of each parameter's gradient: a float64 matrix on the host.

    Three are linear in the gradient (its sum, that of every other element, and its product with
    the parameter), the fourth is its norm. No gradient is kept. The backward starts from `seeds`.
    It leaves `.grad` and the user's hooks as they are: these run once per window, on the whole
    gradient.
    """
    sums: dict[int, Tensor] = {}

    def take(place: int, gradient: Tensor) -> Tensor | None:
        digest = _digest(gradient.detach(), parameters[place].detach())
        sums[place] = sums[place] + digest if place in sums else digest
        if gradient.layout is not torch.strided:
            return None
        return gradient.new_zeros(()).expand_as(gradient)  # frees the gradient at once

    bare = [p for p in parameters if p._backward_hooks is None]
    with emptied(p._backward_hooks for p in parameters):
        handles = [p.register_hook(partial(take, i)) for i, p in enumerate(parameters)]
        try:
            refuse_reentrant(totals)
            torch.autograd.grad(list(totals), parameters, list(seeds), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in bare:  # an empty dictionary would be asked in every backward
                parameter._backward_hooks = None
    read = torch.zeros(len(parameters), _LINEAR + 1, dtype=torch.float64)
    if sums:
        device = next(iter(sums.values())).device
        read[list(sums)] = torch.stack([digest.to(device) for digest in sums.values()]).cpu()
    return read


def _digest(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient, parameter = torch.view_as_real(gradient), torch.view_as_real(parameter)
    if gradient.dtype in SIXTEEN_BIT:
        gradient = gradient.float()
    flat, weights = gradient.reshape(-1), parameter.reshape(-1).to(gradient.dtype)
    numbers = (flat.sum(), flat[::2].sum(), torch.dot(flat, weights), flat.norm())
    return torch.stack(numbers).double()


# --------------------------------------------------------------------- rounding


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that may be rounding: far above its size, far below that of a wrong loss.

    `relative` is of the size of what is summed. `absolute` is of a mean loss, which may be near
    zero because its parts cancel. `rerun` is for the same samples run twice. `gradient` is of each
    parameter's gradient: a deep network amplifies the rounding of its activations.
    """

    relative: float
    absolute: float
    rerun: float
    gradient: float

    @staticmethod
    def of(samples: ChosenSamples, run: SampleRun) -> Tolerance:
        """Return the tolerance of the precision that these samples were computed in."""
        called, dtypes = samples.called, {term.dtype for term in run.terms.values()}
        if called.sixteen_bit or dtypes & set(SIXTEEN_BIT):
            return Tolerance(5e-2, 1e-2, 1e-3, 2e-1)
        if called.float64:
            wide = dtypes <= {torch.float64}  # Transformers smooths labels in float32, always
            return Tolerance(*((1e-7, 1e-12, 1e-12, 1e-6) if wide else (1e-5, 1e-7, 1e-7, 1e-3)))
        on_gpu = any(parameter.is_cuda for _, parameter in samples.parameters)
        if on_gpu and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            return Tolerance(1e-2, 1e-4, 1e-4, 1e-1)
        return Tolerance(1e-3, 1e-5, 1e-6, 3e-3)

    def adds_up(self, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
        """True if every term's total and units are the sums of those of the parts."""
        return self.units_add_up(whole, parts) and all(
            self.near(a.total, b.total, max(a.size, b.size), max(a.units, b.units, 1.0))
            for a, b in _by_term(whole, parts)
        )

    def units_add_up(self, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
        """True if the units of each term are the sum of those of the parts."""
        relative = max(1e-5, self.relative / 100)
        return all(
            abs(a.units - b.units)
            <= max(relative, 2 * a.units_rounding) * max(abs(a.units), abs(b.units))
            for a, b in _by_term(whole, parts)
        )

    def near(self, a: float, b: float, size: float, units: float = 1.0) -> bool:
        """True if two sums differ by rounding alone; also where one is not finite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return True
        return abs(a - b) <= self.relative * size + self.absolute * units

    def same_again(self, first: SampleRun, second: SampleRun) -> bool:
        """True if two runs of the same samples gave the same loss."""
        return not any(
            (math.isfinite(a.total) and abs(a.total - b.total) > self.rerun * max(a.size, b.size))
            or abs(a.units - b.units) > 1e-6 * max(a.units, b.units)
            for a, b in _by_term(first, [second])
        )

    def gradient_gap(
        self, whole: SampleRun, parts: Sequence[SampleRun]
    ) -> tuple[int, float] | None:
        """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
        first, *others = (run.digests for run in (whole, *parts))
        digested = [digests for digests in others if digests is not None]
        if first is None or len(digested) < len(parts):
            return None
        apart = torch.stack(digested).sum(0)
        if not (first.isfinite().all() and apart.isfinite().all()):
            return None
        gaps = (first - apart)[:, :_LINEAR].abs()
        norms = torch.maximum(first, apart)[:, _LINEAR:]
        # A sum of numbers of one sign may be far above the norm, and so is its rounding.
        sums = torch.maximum(first.abs(), apart.abs())[:, :_LINEAR]
        sizes: Tensor = torch.maximum(norms, sums).clamp_min(1e-300)
        # A gradient that is zero but for rounding (the bias of a key in attention) says nothing.
        floor = min(self.gradient, self.relative) * norms.norm()
        over = gaps > torch.maximum(self.gradient * sizes, floor)
        if not bool(over.any()):
            return None
        ratios = torch.where(over, gaps / sizes, 0.0).amax(1)
        worst = int(ratios.argmax())
        return worst, float(ratios[worst])


def _by_term(whole: SampleRun, parts: Sequence[SampleRun]) -> list[tuple[SampledTerm, SampledTerm]]:
    """Return each term of the whole beside the sum of that term over the parts."""
    pairs = []
    for name in {name: None for run in (whole, *parts) for name in run.terms}:
        terms = [part.terms.get(name, SampledTerm()) for part in parts]
        total = math.fsum(term.total for term in terms)
        units = math.fsum(term.units for term in terms)
        size = math.fsum(term.size for term in terms)
        pairs.append((whole.terms.get(name, SampledTerm()), SampledTerm(total, units, size)))
    return pairs
