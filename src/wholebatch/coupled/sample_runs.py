"""A few samples of a batch, run together and in parts, always from the same state."""

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
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.core.splitting.samples import Layout, flatten
from wholebatch.coupled.batchnorm.whole_batch_norm import FixedNorms
from wholebatch.coupled.contrastive.losses import OfTheBatch
from wholebatch.coupled.gradient_digests import gradient_digests
from wholebatch.coupled.held_draws import HeldDraws

__all__ = ["Few", "GoesBack", "Run", "Sum", "Uncheckable", "evaluating", "weight_norms"]


@dataclass(frozen=True, slots=True)
class Sum:
    """One term of a loss."""

    total: float
    units: float
    size: float
    """The size of what was summed, as far as it can be told: rounding is relative to it."""
    weight: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run: the terms of the loss, its gradient, the state that it left behind."""

    sums: Mapping[str, Sum]
    digests: Tensor | None
    after: ForwardState

    @property
    def total(self) -> float:
        """The terms together, each by its weight."""
        return math.fsum(made.total * made.weight for made in self.sums.values())

    @property
    def is_finite(self) -> bool:
        """True if the loss is a number; one of a batch that has none is left to the step."""
        return math.isfinite(self.total)

    @property
    def units(self) -> float:
        return math.fsum(made.units for made in self.sums.values())


class Few:
    """The first `count` samples of a batch, for a model and a function that runs it.

    `run(batch)` returns a Loss, Terms or a tensor of per-unit losses; with `outputs=True` whatever
    tensors have a row for each sample. Use it within `looking()`, which leaves no trace. Each run
    begins from the state that was found, with the same random numbers for each sample.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Any], Any],
        layout: Layout,
        count: int,
        *,
        norms: Sequence[tuple[str, nn.Module]] = (),
        outputs: bool = False,
        graph: bool = True,
    ) -> None:
        self.model = model
        self.layout = layout
        self.count = count
        named = [(n, p) for n, p in model.named_parameters() if _is_plain(p)]
        self.parameters = [(n, p) for n, p in named if p.requires_grad]
        self._data = [(p, p.data) for _, p in named]
        self.start = ForwardState(model, results=True)
        self.weights = weight_norms(model)
        sizes = {id(p): norm / p.numel() ** 0.5 for p, norm in self.weights.items() if p.numel()}
        own = [sizes.get(id(p), 0.0) for _, p in self.parameters]
        self._parameter_sizes = torch.tensor(own, dtype=torch.float64).clamp_min(1e-30)
        self.draws = HeldDraws()
        self._draws_nothing = False
        self.called = Called(model)
        self.graph = graph
        self.run = run
        self._outputs = outputs
        self.fixed = FixedNorms(norms)
        self._seeds: dict[str, float] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within it the samples can be run; what the runs changed is put back at the end."""
        try:
            with (
                warnings.catch_warnings(),
                _eagerly(),
                self.fixed,
                self.called,
                torch.enable_grad(),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            self._begin()

    def whole(self) -> Run:
        """Run all samples, and record what they draw.

        Recording slows every operation down, so a model without dropout runs plainly first.
        """
        self._draws_nothing = False
        if not any(map(_is_dropout, self.model.modules())):
            self._begin()
            run = self._made(0, self.count, scale=1.0, backward=self.graph)
            self._draws_nothing = self.start.draws_same(run.after)
            if self._draws_nothing:
                return run
        self._begin()
        with self.draws.recording():
            return self._made(0, self.count, scale=1.0, backward=self.graph)

    def part(
        self,
        start: int,
        stop: int,
        *,
        prepare: Callable[[], None] = lambda: None,
        backward: bool = False,
        scale: float = 1.0,
    ) -> Run:
        """Run the samples `start` to `stop`, with what they drew in the whole.

        `prepare()` may change the state before. The backward starts from `scale` times what that
        of the whole starts from; what comes is divided by it.
        """
        self._begin()
        prepare()
        backward = backward and self.graph
        if self._draws_nothing:
            return self._made(start, stop, scale=scale, backward=backward)
        with self.draws.serving(start, stop, self.count, to_the_end=backward):
            return self._made(start, stop, scale=scale, backward=backward)

    def of(self, rows: list[int], skip: int = 0) -> Run:
        """Run any samples without a backward; they draw anew, after `skip` draws."""
        self._begin()
        device = next(self.model.parameters()).device
        torch.rand(skip, device=device)
        return self._made(0, len(rows), scale=1.0, backward=False, rows=rows)

    def _begin(self) -> None:
        self.start.restore()
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():  # `parameter.data = …` in a forward
                parameter.data = data
        self.fixed.begin()

    def _made(
        self, start: int, stop: int, *, scale: float, backward: bool, rows: list[int] | None = None
    ) -> Run:
        # Copies, so that a function that changes its batch in place does not change the user's.
        batch = self.layout.take(list(range(start, stop)) if rows is None else rows)
        holding: AbstractContextManager[Any] = nullcontext()
        if not self.graph:
            holding = saved_tensors_hooks(_dropped, _gone)
        with holding:
            terms = self._terms(self.run(batch), start)
        sums = {name: made for name, (made, _) in terms.items()}
        if not self._seeds:
            self._seeds = {n: s.weight / s.units if s.units else s.weight for n, s in sums.items()}
        digests = None
        if backward:
            digests = self._digests({n: t for n, (_, t) in terms.items() if t.requires_grad}, scale)
        del terms
        return Run(sums, digests, ForwardState(self.model, results=True))

    def _digests(self, totals: Mapping[str, Tensor], scale: float) -> Tensor | None:
        if not totals or not self.parameters:
            return None
        # fp16 knows nothing below 6e-8: its gradients are scaled up, and all by the same.
        factor = 1024.0 if self.called.fp16 else scale
        seeds = [
            torch.tensor(self._seeds.get(name, 1.0) * factor, dtype=total.dtype).to(total.device)
            for name, total in totals.items()
        ]
        parameters = [parameter for _, parameter in self.parameters]
        made = gradient_digests(parameters, list(totals.values()), seeds) / factor
        made[:, 2] /= self._parameter_sizes  # of the size of a sum of random signs, as the others
        return made

    def _terms(self, result: Any, start: int) -> dict[str, tuple[Sum, Tensor]]:
        if self._outputs:
            return self._output_terms(result, start)
        size = None
        if isinstance(result, Tensor) and result.dim() and result.is_floating_point():
            size = float(result.detach().abs().sum())
        loss = as_loss(result)
        if isinstance(loss, OfTheBatch):
            raise Uncheckable("a loss of the whole batch, which is refused in parts")
        if isinstance(loss, Loss):
            total = float(loss.total.detach())
            units = float(loss.units)
            size = abs(total) if size is None else size
            return {"": (Sum(total, units, size, 1.0, loss.total.dtype), loss.total)}
        terms = {}
        for name, term in loss.by_name.items():
            total = float(term.total.detach())
            made = Sum(total, float(term.units), abs(total), term.weight, term.total.dtype)
            terms[name] = (made, term.total)
        return terms

    def _output_terms(self, result: Any, start: int) -> dict[str, tuple[Sum, Tensor]]:
        """Tensors with a row for each sample, as sums in which every row counts differently."""
        terms = {}
        for leaf in flatten(result)[0]:
            rows = leaf.value
            if not (isinstance(rows, Tensor) and rows.dim() and rows.is_floating_point()):
                continue
            places = torch.arange(len(rows), device=rows.device, dtype=rows.dtype) + start
            weighted = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
            columns = torch.arange(weighted.shape[1], device=rows.device)
            signs = ((columns * 2654435761 >> 7) % 2 * 2 - 1).to(rows.dtype)
            weighted = weighted * signs * (1 + 0.37 * places)[:, None]
            total, size = weighted.sum(), float(weighted.detach().norm())
            made = Sum(float(total.detach()), float(len(rows)), size, 1.0, rows.dtype)
            terms[leaf.name] = (made, total)
        return terms


def _is_dropout(module: nn.Module) -> bool:
    """True for a layer that draws in training mode."""
    rate = getattr(module, "p", None) or getattr(module, "dropout", None)
    return module.training and isinstance(rate, float) and 0.0 < rate < 1.0


def _is_plain(parameter: nn.Parameter) -> bool:
    """True for an ordinary tensor of floating-point numbers: no subclass, nothing quantised."""
    wide = parameter.dtype in (torch.float64, torch.float32, *SIXTEEN_BIT)
    return wide and type(parameter.data) is Tensor and parameter.layout is torch.strided


@torch.no_grad()
def weight_norms(model: nn.Module) -> dict[nn.Parameter, float]:
    """Return the norm of every parameter, to see whether a forward changes it."""
    found = [p for p in model.parameters() if _is_plain(p)]
    norms = torch._foreach_norm([p.detach() for p in found]) if found else []
    return {parameter: float(norm) for parameter, norm in zip(found, norms, strict=True)}


def _eagerly() -> AbstractContextManager[Any]:
    """Run compiled modules as they are written: the look is not to make them compile again."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class Uncheckable(Exception):
    """Nothing can be told of this loss."""


class GoesBack(Uncheckable):
    """The loss function runs a backward of its own, and there is no memory for it."""


def _dropped(tensor: Tensor) -> None:
    return None


def _gone(nothing: None) -> Tensor:
    raise GoesBack


class Called:
    """Looks at the modules that are called: do they compute in 16 bits, are all in the model?"""

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(module) for module in model.modules()}
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self.low = any(dtype in SIXTEEN_BIT for dtype in dtypes)
        self.fp16 = torch.float16 in dtypes
        self.wide = all(d in (torch.float64, torch.complex128) for d in dtypes)
        self.outside: str | None = None

    def __enter__(self) -> Called:
        self._hook = register_module_forward_pre_hook(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.low = True
                self.fp16 = self.fp16 or torch.get_autocast_dtype(kind) == torch.float16
        if isinstance(module, _BatchNorm) and module.training and id(module) not in self._own:
            self.outside = type(module).__name__


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode for a while."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
