"""Run some samples of a batch together and in parts, and tell rounding from another loss.

Every run gives each sample the same random numbers (`HeldDraws`). Of its gradient a few numbers are
kept. What the runs change is put back as far as `ForwardState` can.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.gradient_digests import gap_of, gradient_digests
from wholebatch.audit.held_draws import HeldDraws
from wholebatch.batch.samples import Layout, flatten
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    fixed_statistics,
    uses_batch_statistics,
)
from wholebatch.losses.loss import as_loss, is_nothing, refuse_in_parts, terms_of
from wholebatch.window.autograd_graph import graph_nodes, version_of
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.precision import SIXTEEN_BIT
from wholebatch.window.reachable_objects import own_generators

SCALE = 1024.0
"""The scale of backwards: one that clips, or takes a sign, is not linear in it."""


@dataclass(frozen=True, slots=True)
class SampledTerm:
    """One term of the loss of some samples; rounding is relative to `size`, what was summed."""

    total: float = 0.0
    units: float = 0.0
    size: float = 0.0
    weight: float = 1.0


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


def spread_rows(size: int, count: int) -> list[int]:
    """Return the places of `count` samples, spread evenly from the first of `size` to the last.

    A batch may be sorted: by length, or labelled samples first. Neighbours are alike then, and a
    mean over the wrong units adds up.

    >>> spread_rows(22, 8)
    [0, 3, 6, 9, 12, 15, 18, 21]
    """
    return [place * (size - 1) // max(count - 1, 1) for place in range(count)]


class ChosenSamples:
    """Samples spread over a batch, for a model and a function that runs it.

    `run(batch)` returns a Loss, Terms or a tensor of per-unit losses; with `outputs=True` whatever
    tensors have a row for each sample. With `graph=False` runs make no graph. Use it within
    `testing()`, which puts back what the runs have changed.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Any], Any],
        layout: Layout,
        rows: Sequence[int],
        *,
        graph: bool,
        outputs: bool = False,
    ) -> None:
        self.model, self.run, self.layout, self.rows = model, run, layout, rows
        self.graph, self.reads_outputs = graph, outputs
        # Uneven parts, the first of an odd number: two equal ones may have equally many labels, and
        # then any mean adds up; means of the hardest half of even ones may do so by chance.
        self.cut = max(1, (3 * len(rows) // 8 - 1) | 1)
        # ZeRO-3 holds a parameter empty until its first forward.
        plain = [(n, p) for n, p in model.named_parameters() if _is_plain(p) and p.numel()]
        self.parameters = [(name, p) for name, p in plain if p.requires_grad]
        self._versions = [(name, p, version_of(p)) for name, p in plain]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._data = [(p, p.data) for _, p in plain]
        whole = (leaf.value for leaf in layout.leaves if not leaf.batched)
        shared = [t for t in whole if isinstance(t, Tensor) and not t.requires_grad]
        self._shared = [(tensor, tensor.clone()) for tensor in shared]
        self._generators = own_generators(model, run)
        self.start: ForwardState
        self.draws, self._draws = HeldDraws(), False
        self.precision = Precision.of(p.dtype for _, p in plain)
        self._seeds: dict[str, float] = {}

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Allow runs within it; at its end put back what they have changed."""
        eagerly: AbstractContextManager[Any] = nullcontext()
        if "torch._dynamo" in sys.modules:  # the test is not to make modules compile again
            eagerly = torch.compiler.set_stance("force_eager")
        norms = [norm for norm in batchnorms(self.model) if uses_batch_statistics(norm[1])]
        with warnings.catch_warnings(), eagerly, fixed_statistics(norms):
            warnings.simplefilter("ignore")
            self.start = ForwardState(self.model, generators=self._generators)
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Restore the state that was found, as far as it can be."""
        self.start.restore()
        for parameter, is_trained in self._trained:  # a loss function may freeze one
            if parameter.requires_grad is not is_trained:
                parameter.requires_grad_(is_trained)
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():  # `parameter.data = …` in a forward
                parameter.data = data
        for tensor, value in self._shared:  # a running mean that the batch carries
            if not tensor.equal(value):
                tensor.copy_(value)

    def written_parameter(self) -> str | None:
        """Return the name of a parameter that a forward has written; None if there is none."""
        return next((n for n, p, before in self._versions if version_of(p) != before), None)

    def whole(self, rows: Sequence[int] | None = None) -> SampleRun:
        """Run all samples from the state that was found, and record what they draw.

        Recording slows every operation down, and not every kernel allows it: a loss that draws
        nothing runs plainly.
        """
        rows = self.rows if rows is None else rows
        self.restore()
        run = self._run(rows, backward=self.graph)
        self._draws = not self.start.draws_same(run.after, host=False)
        self.draws.held = True
        if self._draws:
            self.restore()
            with self.draws.recording():
                run = self._run(rows, backward=self.graph)
        return run

    def part(
        self, rows: Sequence[int], *, again: bool = True, scale: float | None = None
    ) -> SampleRun:
        """Run a part of the samples, with what they drew in the whole.

        `again=False` leaves the state as the run before has left it. With `scale` it makes a
        gradient, from `scale` times what that of the whole starts from.
        """
        if again:
            self.restore()
        else:
            self.start.restore_random()
        backward = self.graph and scale is not None
        serving = self.draws.serving(to_the_end=backward) if self._draws else nullcontext()
        with serving:
            return self._run(rows, backward=backward, scale=scale or 1.0)

    def _run(self, rows: Sequence[int], *, backward: bool, scale: float = 1.0) -> SampleRun:
        # Copies, so that a function that changes its batch in place does not change the user's.
        batch = self.layout.take([*rows])
        with torch.set_grad_enabled(self.graph):
            result = self.run(batch)
            places = [self.rows.index(row) if row in self.rows else row for row in rows]
            pairs = _output_terms(result, places) if self.reads_outputs else _loss_terms(result)
        del result
        totals = {
            name: total
            for name, (_, total) in pairs.items()
            if total.requires_grad and not is_nothing(total)
        }
        self.precision = self.precision.with_dtypes(pair[1] for pair in pairs.values())
        terms = {name: term for name, (term, _) in pairs.items()}
        if not self._seeds:
            self._seeds = {n: t.weight / t.units if t.units else t.weight for n, t in terms.items()}
        digests = None
        if backward and totals and self.parameters and self.compares_gradients:
            seeds = [
                torch.tensor(self._seeds.get(name, 1.0) * scale, dtype=total.dtype).to(total.device)
                for name, total in totals.items()
            ]
            parameters = [parameter for _, parameter in self.parameters]
            digests = gradient_digests(parameters, list(totals.values()), seeds) / scale
        return SampleRun(terms, digests, ForwardState(self.model, generators=self._generators))

    # ------------------------------------------------------------ comparisons

    @property
    def compares_gradients(self) -> bool:
        """False in 16 bit: the gradient of a deep network may be mostly rounding."""
        return self.precision.narrowest not in SIXTEEN_BIT

    def adds_up(self, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
        """True if every term's total and units are the sums of those of the parts."""
        return self.units_add_up(whole, parts) and all(
            self.near(a.total, b.total, max(a.size, b.size), max(a.units, b.units, 1.0))
            for a, b in _by_term(whole, parts)
        )

    def units_add_up(self, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
        """True if the units of each term are the sum of those of the parts."""
        relative = max(1e-5, self.precision.relative / 5)
        return all(
            abs(a.units - b.units) <= relative * max(abs(a.units), abs(b.units))
            for a, b in _by_term(whole, parts)
        )

    def near(self, a: float, b: float, size: float, units: float = 1.0) -> bool:
        """True if two sums differ by rounding alone; also where one is not finite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return True
        return abs(a - b) <= self.precision.relative * size + self.precision.absolute * units

    def same_again(self, first: SampleRun, second: SampleRun) -> bool:
        """True if two runs of the same samples gave the same loss."""
        rounding = self.precision.relative / (1e3 if self.compares_gradients else 50)
        return not any(
            (math.isfinite(a.total) and abs(a.total - b.total) > rounding * max(a.size, b.size))
            or abs(a.units - b.units) > 1e-6 * max(a.units, b.units)
            for a, b in _by_term(first, [second])
        )

    def gradient_gap(
        self, whole: SampleRun, parts: Sequence[SampleRun]
    ) -> tuple[str, float] | None:
        """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
        digests = [run.digests for run in parts if run.digests is not None]
        if whole.digests is None or len(digests) < len(parts):
            return None
        gap = gap_of(whole.digests, digests, self.precision.gradient)
        return None if gap is None else (self.parameters[gap[0]][0], gap[1])


# --------------------------------------------------------------------- rounding

_ORDER = (torch.float64, torch.float32, *SIXTEEN_BIT)


@dataclass(frozen=True, slots=True)
class Precision:
    """The narrowest dtype that a loss was computed in, and what may be rounding in it.

    The tolerances are far above the size of rounding, and far below that of a wrong loss.
    """

    narrowest: torch.dtype

    @staticmethod
    def of(dtypes: Any) -> Precision:
        """Return the precision of the narrowest of these dtypes; of none, single precision."""
        known = [dtype for dtype in _ORDER if dtype in set(dtypes)]
        return Precision(known[-1] if known else torch.float32)

    def with_dtypes(self, totals: Any) -> Precision:
        """Return the precision of losses that were computed so, by their graphs and by autocast."""
        totals = list(totals)
        nodes = graph_nodes(total for total in totals if total.requires_grad)
        dtypes = {meta.dtype for node in nodes for meta in getattr(node, "_input_metadata", ())}
        dtypes |= {total.dtype for total in totals}
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                dtypes.add(torch.get_autocast_dtype(kind))
        return Precision.of({self.narrowest, *dtypes})

    @property
    def relative(self) -> float:
        """What may be rounding, relative to the size of what is summed."""
        return self._of(5e-2, 1e-2, 1e-3, 1e-7)

    @property
    def absolute(self) -> float:
        """What may be rounding of a mean, which may be near zero because its parts cancel."""
        return self._of(1e-2, 1e-4, 1e-5, 1e-12)

    @property
    def gradient(self) -> float:
        """What may be rounding of a parameter's gradient: a deep network amplifies it."""
        return self._of(math.inf, 1e-1, 3e-3, 1e-6)

    def _of(self, sixteen_bit: float, tf32: float, single: float, double: float) -> float:
        if self.narrowest in SIXTEEN_BIT:
            return sixteen_bit
        if self.narrowest is torch.float64:
            return double
        cuda = torch.cuda.is_initialized()
        allows = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return tf32 if cuda and allows else single


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


# --------------------------------------------------------------------- terms


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
        terms[leaf.name] = (SampledTerm(float(total.detach()), float(len(rows)), size), total)
    return terms


def _loss_terms(result: Any) -> dict[str, tuple[SampledTerm, Tensor]]:
    size = None
    if isinstance(result, Tensor) and result.dim() and result.is_floating_point():
        size = float(result.detach().abs().sum())
    loss = as_loss(result)
    refuse_in_parts(loss)
    terms = {}
    for name, term in terms_of(loss).items():
        total = float(term.total.detach())
        summed = abs(total) if size is None else size
        terms[name] = (SampledTerm(total, float(term.units), summed, term.weight), term.total)
    return terms


def _is_plain(parameter: nn.Parameter) -> bool:
    """True for an ordinary tensor of floating-point numbers: no subclass, nothing quantised."""
    plain = type(parameter.data) is Tensor and parameter.layout is torch.strided
    return plain and (parameter.dtype in _ORDER or parameter.is_complex())
