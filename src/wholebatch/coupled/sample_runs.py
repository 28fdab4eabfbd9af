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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from wholebatch.core.backward import is_reentrant
from wholebatch.core.forward_state import ForwardState
from wholebatch.core.gradient_hooks import DeferredHooks
from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.core.splitting.layout import Layout
from wholebatch.core.splitting.structure import flatten
from wholebatch.coupled.batchnorm.fixed_norms import FixedNorms
from wholebatch.coupled.contrastive.losses import OfTheBatch

__all__ = [
    "Few",
    "GoesBack",
    "HeldDraws",
    "Run",
    "Sum",
    "Tolerance",
    "Uncheckable",
    "evaluating",
    "gradient_digests",
    "weight_norms",
]

_DROPOUTS = ("aten::native_dropout", "aten::_fused_dropout")
_DRAWS_BY_INPUT = ("aten::rrelu_with_noise", "aten::rrelu_with_noise_", "aten::randperm")
_CHANCES = ("dropout_p", "dropout", "p")


class HeldDraws(TorchDispatchMode):
    """Records what torch draws, and gives it again to some of the rows.

    The k-th draw of a part is given the k-th draw of the whole: its own rows of it, along the one
    dimension that is smaller in proportion, or all of it where the shapes are the same. `failed`
    says what could not be held, if anything: a fused kernel that draws by itself, another number
    of draws, a shape that does not fit.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: str | None = None
        self._doubtful = False
        self._drawn: list[Tensor] = []
        self._names: list[str] = []
        self._part: tuple[int, int, int] | None = None
        self._next = 0
        self._is_draw: dict[int, bool] = {}

    @property
    def held(self) -> bool:
        """True if every draw of the parts so far was given the numbers of its rows.

        A draw that was cut along a dimension that holds more than the samples is doubtful.
        """
        return self.failed is None and not self._doubtful

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of the whole."""
        self.failed, self._doubtful = None, False
        self._drawn, self._names, self._part = [], [], None
        with self:
            yield

    @contextmanager
    def serving(self, start: int, stop: int, of: int, *, to_the_end: bool = True) -> Iterator[None]:
        """Give the rows `start` to `stop` of the whole (`of` rows) what they drew in it."""
        self._part, self._next = (start, stop, of), 0
        with self:
            yield
        if to_the_end and self._next != len(self._drawn):
            self._fail(f"{self._next} draws instead of {len(self._drawn)}")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called for every operation: by identity, since an operation's own hash is Python code.
        is_draw = self._is_draw.get(id(func))
        if is_draw is None:
            is_draw = self._is_draw[id(func)] = torch.Tag.nondeterministic_seeded in func.tags
        given = kwargs or {}
        if not is_draw or _draws_nothing(func, args, given):
            return func(*args, **given)
        made = func(*args, **given)
        if func._schema.name in _DROPOUTS:
            return self._dropout(func, args, made)
        if not isinstance(made, Tensor):
            self._fail(func._schema.name)
            return made
        self._hold(func._schema.name, made)
        return made

    def _dropout(self, func: Any, args: Sequence[Any], made: tuple[Tensor, Tensor]) -> Any:
        """The mask is what was drawn; the output follows from it."""
        out, mask = made
        if self._hold(func._schema.name, mask) and args[1] < 1:
            kept = args[1] if func._schema.name == "aten::_fused_dropout" else 1.0 - args[1]
            out = args[0] * mask.to(args[0].dtype) * (1.0 / kept)
        return out, mask

    def _hold(self, name: str, made: Tensor) -> bool:
        """Record a draw, or put the recorded numbers into it; True if it was changed."""
        if self._part is None:
            self._drawn.append(made.detach().clone())
            self._names.append(name)
            return False
        place, self._next = self._next, self._next + 1
        if place >= len(self._drawn) or self._names[place] != name:
            self._fail(f"{name} is drawn at another place")
            return False
        rows = self._rows_of(self._drawn[place], made.shape)
        if rows is None or (name in _DRAWS_BY_INPUT and rows.shape != self._drawn[place].shape):
            self._fail(f"{name} of shape {tuple(made.shape)}")
            return False
        made.copy_(rows)
        return True

    def _rows_of(self, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
        if whole.shape == tuple(shape):
            return whole
        assert self._part is not None
        start, stop, of = self._part
        if whole.dim() != len(shape):
            return None
        differing = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
        if len(differing) != 1:
            return None
        dim, size = differing[0], whole.shape[differing[0]]
        if size % of or size // of * (stop - start) != shape[dim]:
            return None
        self._doubtful = self._doubtful or size != of
        return whole.narrow(dim, size // of * start, shape[dim])

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why


def _draws_nothing(func: Any, args: Sequence[Any], given: dict[str, Any]) -> bool:
    """True for a fused kernel whose dropout is off."""
    if not ("attention" in func._schema.name or "rnn" in func._schema.name):
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCES and str(argument.type) == "float":
            default = argument.default_value if argument.has_default_value() else 0.0
            value = args[place] if place < len(args) else given.get(argument.name, default)
            return math.isclose(float(value or 0.0), 0.0)
    return False


LINEAR = 3
"""So many numbers of a digest are linear in the gradient; the last is its norm."""


def gradient_digests(
    parameters: Sequence[nn.Parameter], totals: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Tensor:
    """Return the digest of each parameter's gradient: a float64 matrix on the host.

    Three numbers are linear in the gradient (its sum, that of every other element, and its product
    with the parameter), the fourth is its norm. The backward starts from `seeds`. It leaves `.grad`
    and the user's hooks as they are: these run once per window, on the whole gradient.
    """
    sums: dict[int, Tensor] = {}

    def hook(place: int, parameter: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def digest(gradient: Tensor) -> Tensor | None:
            with _disable_current_modes():  # they would be asked for each of these operations
                made = _digest(gradient.detach(), parameter.detach())
                sums[place] = sums[place] + made if place in sums else made
                if gradient.layout is not torch.strided:
                    return None
                return gradient.new_zeros(()).expand_as(gradient)  # frees the gradient at once

        return digest

    with _without_hooks(parameters):
        bare = [p for p in parameters if p._backward_hooks is None]
        handles = [p.register_hook(hook(i, p)) for i, p in enumerate(parameters)]
        try:
            if is_reentrant(totals):  # its checkpoints refuse autograd.grad
                with _gradients_kept(parameters):
                    torch.autograd.backward(list(totals), list(seeds))
            else:
                torch.autograd.grad(list(totals), parameters, list(seeds), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in bare:  # an empty dictionary would be asked in every backward
                parameter._backward_hooks = None
    read = torch.zeros(len(parameters), LINEAR + 1, dtype=torch.float64)
    if sums:
        device = next(iter(sums.values())).device
        read[list(sums)] = torch.stack([made.to(device) for made in sums.values()]).cpu()
    return read


def _digest(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient, parameter = torch.view_as_real(gradient), torch.view_as_real(parameter)
    if gradient.dtype in SIXTEEN_BIT:
        gradient = gradient.float()
    flat, weights = gradient.reshape(-1), parameter.reshape(-1).to(gradient.dtype)
    made = (flat.sum(), flat[::2].sum(), torch.dot(flat, weights), flat.norm())
    return torch.stack(made).double()


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take off the user's hooks of parameters, of both kinds."""
    hooks = DeferredHooks()
    hooks.take(parameters)
    # Autograd holds the dictionary itself, so it is emptied and filled again.
    found = [p._post_accumulate_grad_hooks for p in parameters]
    after: list[tuple[dict[int, Any], dict[int, Any]]] = [(own, dict(own)) for own in found if own]
    for own, _ in after:
        own.clear()
    try:
        yield
    finally:
        hooks.give_back()
        for own, taken in after:
            own.update(taken)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient


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


_NOTHING = Sum(0.0, 0.0, 0.0, 1.0, torch.float32)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Far more than rounding makes of a sum, far less than another loss does.

    `relative` is of the size of what is summed. `absolute` is of a mean loss, which may be near
    zero because its parts cancel. `again` is for the same samples run twice. `floor` is of the
    gradient over all parameters: one that is zero but for rounding (the bias of a key in
    attention) says nothing.
    """

    relative: float
    absolute: float
    again: float
    floor: float

    @staticmethod
    def of(few: Few, run: Run) -> Tolerance:
        """Return that of the precision that these samples were computed in."""
        called, dtypes = few.called, {made.dtype for made in run.sums.values()}
        if called.low or dtypes & set(SIXTEEN_BIT):
            return Tolerance(5e-2, 1e-2, 1e-2, 5e-2)
        if called.wide and dtypes <= {torch.float64}:
            return Tolerance(1e-9, 1e-12, 1e-12, 1e-12)
        on_gpu = any(parameter.is_cuda for _, parameter in few.parameters)
        if on_gpu and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            return Tolerance(1e-2, 1e-4, 1e-4, 1e-3)
        return Tolerance(1e-3, 1e-5, 1e-5, 1e-5)

    def adds_up(self, whole: Run, parts: Sequence[Run]) -> bool:
        """True if every term's total and units are the sums of those of the parts."""
        for name in _names([whole, *parts]):
            made = [run.sums.get(name, _NOTHING) for run in (whole, *parts)]
            if not self._is_sum(made[0], made[1:]):
                return False
        return self.units_add_up(whole, parts)

    def units_add_up(self, whole: Run, parts: Sequence[Run]) -> bool:
        """True if the units of each term are the sum of those of the parts."""
        for name in _names([whole, *parts]):
            units = whole.sums.get(name, _NOTHING).units
            apart = math.fsum(part.sums.get(name, _NOTHING).units for part in parts)
            if abs(units - apart) > max(1e-5, self.relative / 100) * max(abs(units), abs(apart)):
                return False
        return True

    def _is_sum(self, whole: Sum, parts: Sequence[Sum]) -> bool:
        size = max(whole.size, math.fsum(part.size for part in parts))
        units = max(whole.units, math.fsum(part.units for part in parts), 1.0)
        return self.near(whole.total, math.fsum(part.total for part in parts), size, units)

    def near(self, a: float, b: float, size: float, units: float = 1.0) -> bool:
        """True if two sums differ by rounding alone; also where one is not finite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return True
        return abs(a - b) <= self.relative * size + self.absolute * units

    def same_again(self, a: Run, b: Run) -> bool:
        """True if two runs of the same samples gave the same loss."""
        for name in _names([a, b]):
            x, y = a.sums.get(name, _NOTHING), b.sums.get(name, _NOTHING)
            if math.isfinite(x.total) and abs(x.total - y.total) > self.again * max(x.size, y.size):
                return False
            if abs(x.units - y.units) > 1e-6 * max(x.units, y.units):
                return False
        return True

    def gradient_gap(self, whole: Run, parts: Sequence[Run]) -> tuple[int, float] | None:
        """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
        made = [run.digests for run in (whole, *parts)]
        if any(digests is None for digests in made):
            return None
        first, *others = [digests for digests in made if digests is not None]
        apart = torch.stack(others).sum(0)
        if not (first.isfinite().all() and apart.isfinite().all()):
            return None
        gaps = (first - apart)[:, :LINEAR].abs().amax(1)
        sizes: Tensor = torch.maximum(first[:, LINEAR], apart[:, LINEAR])
        over = gaps > torch.maximum(3 * self.relative * sizes, self.floor * sizes.norm())
        if not bool(over.any()):
            return None
        ratios = torch.where(over, gaps / sizes.clamp_min(1e-300), 0.0)
        worst = int(ratios.argmax())
        return worst, float(ratios[worst])


def identical(a: Run, b: Run) -> bool:
    """True if two runs gave the same loss to the last bit."""
    return {n: (s.total, s.units) for n, s in a.sums.items()} == {
        n: (s.total, s.units) for n, s in b.sums.items()
    } or not math.isfinite(a.total)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sums))
