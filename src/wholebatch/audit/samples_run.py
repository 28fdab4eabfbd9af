"""Run some samples of a batch together and in parts; leave the model as it was found.

Of each gradient a few numbers are kept. What the runs change is put back as far as `ForwardState`
can.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wholebatch.audit.gradient_digests import gradient_digests
from wholebatch.batch.samples import Layout, flatten
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    fixed_statistics,
    uses_batch_statistics,
)
from wholebatch.losses.loss import Term, as_loss, is_nothing, refuse_in_parts, terms_of
from wholebatch.window.autograd_graph import graph_nodes, version_of
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.precision import SIXTEEN_BIT
from wholebatch.window.reachable_objects import own_generators

SCALE = 1024.0
"""The scale of backwards: one that clips, or takes a sign, is not linear in it."""
_ORDER = (torch.float64, torch.float32, *SIXTEEN_BIT)


class SampledTerm(NamedTuple):
    """The total of a term and its units."""

    total: float = 0.0
    units: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleRun:
    """The terms of a loss, the digests of its gradient, and the state that the run left behind."""

    terms: Mapping[str, SampledTerm]
    digests: Tensor | None
    after: ForwardState

    @property
    def total(self) -> float:
        return math.fsum(term.total for term in self.terms.values())

    @property
    def units(self) -> float:
        return math.fsum(term.units for term in self.terms.values())


class Rounding(NamedTuple):
    """How far sums may be apart by rounding alone; a wrong loss is further off."""

    relative: float
    """Relative to the size of what is summed."""
    absolute: float
    """For each unit, where parts cancel."""
    gradient: float
    """Relative to a parameter's gradient: a deep network amplifies rounding."""

    @staticmethod
    def of(dtypes: Iterable[torch.dtype], totals: Sequence[Tensor]) -> Rounding:
        """Return that of the narrowest of these dtypes, of the losses' graphs, and of autocast."""
        nodes = graph_nodes(total for total in totals if total.requires_grad)
        present = {meta.dtype for node in nodes for meta in getattr(node, "_input_metadata", ())}
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        present.update(dtypes, map(torch.get_autocast_dtype, kinds), (t.dtype for t in totals))
        if not present.isdisjoint(SIXTEEN_BIT):
            return Rounding(5e-2, 1e-2, math.inf)
        if torch.float32 not in present:
            return Rounding(1e-7, 1e-12, 1e-6)
        allows = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        if torch.cuda.is_initialized() and allows:
            return Rounding(1e-2, 1e-4, 1e-1)
        return Rounding(1e-3, 1e-5, 3e-3)

    @property
    def finer(self) -> float:
        """How far two runs of the same samples may be apart by rounding, relative to the total."""
        return self.relative / (1e3 if self.relative < 1e-2 else 50)

    def near(self, whole: float, parts: Sequence[float], units: float) -> bool:
        """True if a total differs from its parts' sum by rounding; also where one is not finite."""
        apart = abs(whole - math.fsum(parts))
        size = max(abs(whole), math.fsum(map(abs, parts)))
        allowed = self.relative * size + self.absolute * units
        return not math.isfinite(apart) or apart <= allowed


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
        self._generators = own_generators(model, run)
        self.start: ForwardState
        self.rounding: Rounding
        self._weights: dict[str, float] = {}

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
                self._restore()

    def _restore(self) -> None:
        self.start.restore()
        for parameter, is_trained in self._trained:  # a loss function may freeze one
            if parameter.requires_grad is not is_trained:
                parameter.requires_grad_(is_trained)

    def written_parameter(self) -> str | None:
        """Return the name of a parameter that a forward has written; None if there is none."""
        return next((n for n, p, before in self._versions if version_of(p) != before), None)

    def draws(self, run: SampleRun) -> bool:
        """True if a run has drawn random numbers."""
        return not all(self.start.draws_same(run.after, host=host) for host in (False, True))

    def whole(self) -> SampleRun:
        """Run all samples from the state that was found."""
        self._weights = {}
        return self.part(self.rows, scale=1.0)

    def part(
        self, rows: Sequence[int], *, again: bool = True, scale: float | None = None
    ) -> SampleRun:
        """Run a part of the samples.

        `again=False` leaves the state as the run before has left it. With `scale` it makes a
        gradient, from `scale` times what that of the whole starts from.
        """
        if again:
            self._restore()
        # Copies, so that a function that changes its batch in place does not change the user's.
        batch = self.layout.take([*rows])
        with torch.set_grad_enabled(self.graph):
            result = self.run(batch)
            terms = self._output_terms(result, rows) if self.reads_outputs else _terms(result)
            del result
            dtypes = (parameter.dtype for _, parameter, _ in self._versions)
            self.rounding = Rounding.of(dtypes, [term.total for term in terms.values()])
            digests = None if scale is None else self._digests(terms, scale)
        read = {
            name: SampledTerm(float(term.total.detach()), float(term.units))
            for name, term in terms.items()
        }
        return SampleRun(read, digests, ForwardState(self.model, generators=self._generators))

    def _digests(self, terms: Mapping[str, Term], scale: float) -> Tensor | None:
        """Return a few numbers of the gradient of all terms, each by the units of the whole.

        None in 16 bit: the gradient of a deep network may be mostly rounding.
        """
        if not self._weights:
            self._weights = {n: t.weight / (float(t.units) or 1.0) for n, t in terms.items()}
        totals = {
            name: term.total
            for name, term in terms.items()
            if term.total.requires_grad and not is_nothing(term.total)
        }
        if not (totals and self.parameters) or self.rounding.gradient == math.inf:
            return None
        seeds = [t.new_tensor(self._weights.get(n, 1.0) * scale) for n, t in totals.items()]
        parameters = [parameter for _, parameter in self.parameters]
        return gradient_digests(parameters, list(totals.values()), seeds) / scale

    def _output_terms(self, result: Any, rows: Sequence[int]) -> dict[str, Term]:
        """Return tensors with a row for each sample as sums in which no two numbers count alike."""
        terms = {}
        for leaf in flatten(result)[0]:
            output = leaf.value
            if not (isinstance(output, Tensor) and output.is_floating_point() and output.dim()):
                continue
            if len(output) == len(rows):
                columns = output.reshape(len(rows), -1).abs()
                places = torch.arange(columns.shape[1], device=output.device)
                weights = (1.5 + (places * 1.7).cos()).to(output.dtype)
                by_row = output.new_tensor([1 + 0.37 * self.rows.index(row) for row in rows])
                terms[leaf.name] = Term((columns * weights * by_row[:, None]).sum(), len(rows))
        return terms


def _terms(result: Any) -> dict[str, Term]:
    loss = as_loss(result)
    refuse_in_parts(loss)
    return terms_of(loss)


def _is_plain(parameter: nn.Parameter) -> bool:
    """True for an ordinary tensor of floating-point numbers: no subclass, nothing quantised."""
    plain = type(parameter.data) is Tensor and parameter.layout is torch.strided
    return plain and (parameter.dtype in _ORDER or parameter.is_complex())
