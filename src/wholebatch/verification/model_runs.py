"""Observed runs of one model from the same start: the undivided batch, and its micro-batches.

The undivided batch runs by plain torch: forward, backward, clip, step, and no engine in it. Under
data-parallel ranks the batch is the global one: every rank runs its own part undivided, and the
gradients of the sums are added over the ranks and divided by the units of all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import batch_size_of, split, to_device
from wholebatch.batch.samples import flatten, layout_of
from wholebatch.coupled import batchnorms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.normalisation_layers import needs_whole_batch, uses_batch_statistics
from wholebatch.distributed.process_group import sum_over_ranks, world_size
from wholebatch.errors import NonFiniteError, WholebatchError
from wholebatch.losses.loss import as_loss, terms_of, wide
from wholebatch.options import grouped
from wholebatch.verification.observed_window import StartingState, StepObserver, WindowRun
from wholebatch.whole_batch import WholeBatch
from wholebatch.window.autocast import Precision
from wholebatch.window.close import power_of_two_near
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.forward_state import capture_random, same_random
from wholebatch.window.precision import choose

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TF32 = 2.0**-11
"""The error of one rounding to TensorFloat-32, which CUDA devices may multiply float32 in."""


@dataclass(frozen=True)
class Numbers:
    """The number formats of a run: its precision, and the loss scale that fp16 needs."""

    precision: str = "full"
    loss_scale: float = 1.0

    def unit(self, model: nn.Module) -> float:
        """Return the relative error of one rounding in the coarsest format that takes part."""
        formats = [p.dtype.to_real() for p in model.parameters()]
        if self.precision != "full":
            formats.append(AUTOCAST.get(self.precision, torch.bfloat16))
        unit = max(torch.finfo(dtype).eps / 2 for dtype in formats)
        return max(unit, _TF32) if torch.float32 in formats and _uses_tf32(model) else unit

    def forward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._chosen(model).forward()

    def window(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a forward and its backward, which checkpointing computes in."""
        return self._chosen(model).window()

    def _chosen(self, model: nn.Module) -> Precision:
        return choose(self.precision, next(model.parameters()).device.type)


def _uses_tf32(model: nn.Module) -> bool:
    """Tell if torch's settings allow TensorFloat-32 in products of this model."""
    if next(model.parameters()).device.type != "cuda":
        return False
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving these settings to other names
        try:
            return bool(
                torch.backends.cuda.matmul.allow_tf32
                or (convolves and torch.backends.cudnn.allow_tf32)
            )
        except RuntimeError:  # old and new names were mixed: one of them was set
            return True


@dataclass(frozen=True)
class Objective:
    """The sums of one batch, the units of each, and the weight of its mean."""

    names: tuple[str, ...]
    totals: tuple[Tensor, ...]
    units: tuple[float, ...]
    weights: tuple[float, ...]

    def mean(self, units: Sequence[float] | None = None) -> Tensor:
        """Return the sum of weight × total / units over the terms; `units` replaces their own."""
        over = self.units if units is None else units
        parts = [
            total * (weight / count if count else 0.0)
            for total, count, weight in zip(self.totals, over, self.weights, strict=True)
        ]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def objective(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, numbers: Numbers
) -> Objective:
    """Run one forward of the batch as it is."""
    device = next(model.parameters()).device
    with numbers.forward(model):
        result = as_loss(loss(model, to_device(batch, device)))
    by_name = terms_of(result)
    terms = by_name.values()
    return Objective(
        tuple(by_name),
        tuple(wide(term.total) for term in terms),  # its division adds no rounding of its own
        tuple(float(term.units) for term in terms),
        tuple(term.weight for term in terms),
    )


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, clip_norm: ClipNorm, clip_value: float | None) -> None:
    """Clip the gradients with torch's own functions."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    together = [parameter for group in groups for parameter in group]
    if clip_value is not None:
        nn.utils.clip_grad_value_(together, clip_value)
    if clip_norm is None:
        return
    by_group = isinstance(clip_norm, Sequence)
    limits = clip_norm if isinstance(clip_norm, Sequence) else [clip_norm]
    for group, limit in zip(groups if by_group else [together], limits, strict=True):
        if limit is not None:
            norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            # The norm of shards is a partial one, to which torch would add its 1e-6 on each rank.
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            nn.utils.clip_grads_with_norm_(group, limit, norm)


@dataclass(frozen=True)
class DividedBatch:
    """A whole batch, the size of its micro-batches, and how its samples are found."""

    whole: Any
    micro_batch: Any = None
    batch_size: int | Callable[[Any], int] | None = None
    static: str | Sequence[str] = ()

    @property
    def samples(self) -> int:
        return batch_size_of(self.whole, batch_size=self.batch_size, static=self.static)

    def micro_batches(self) -> list[Any]:
        return split(self.whole, self.micro_batch, batch_size=self.batch_size, static=self.static)

    def first(self, samples: int) -> DividedBatch:
        """Return the first samples; a micro-batch as large as all of them is made smaller."""
        layout = layout_of(self.whole, batch_size=self.batch_size, static=self.static)
        part = layout.take(slice(samples))
        size = samples if isinstance(self.batch_size, int) else self.batch_size
        is_whole = isinstance(self.micro_batch, int) and self.micro_batch >= samples
        micro_batch = uneven(samples) if is_whole else self.micro_batch
        return replace(self, whole=part, micro_batch=micro_batch, batch_size=size)

    def in_other_orders(self) -> list[tuple[Any, list[int]]]:
        """Return the whole batch with its samples reversed, and shuffled; and which is where."""
        generator = torch.Generator().manual_seed(0)
        layout = layout_of(self.whole, batch_size=self.batch_size, static=self.static)
        shuffled = torch.randperm(self.samples, generator=generator).tolist()
        orders = (list(reversed(range(self.samples))), shuffled)
        return [(layout.take(order), order) for order in orders]

    def in_float64(self) -> DividedBatch:
        """Return the batch with its floating-point tensors in float64."""
        leaves, structure = flatten(self.whole)
        floats = [isinstance(x.value, Tensor) and x.value.is_floating_point() for x in leaves]
        pairs = zip(leaves, floats, strict=True)
        wide = [leaf.value.double() if is_float else leaf.value for leaf, is_float in pairs]
        return replace(self, whole=structure.build(wide))


def uneven(samples: int) -> int:
    """Return a size that makes about four micro-batches, of which the last is smaller."""
    size = -(-samples // 4)
    return size if samples % size or size == 1 else max(1, size - 1)


def joined(micros: Sequence[Any], sizes: Sequence[int] | None = None) -> Any | None:
    """Return the batch that micro-batches are parts of; None if they do not fit together.

    `sizes` are their numbers of samples, where those are known.

    >>> joined([{"x": torch.ones(2, 3), "t": 0.5}, {"x": torch.zeros(1, 3), "t": 0.5}])["x"].shape
    torch.Size([3, 3])
    """
    try:
        known = [None] * len(micros) if sizes is None else sizes
        pairs = zip(micros, known, strict=True)
        layouts = [layout_of(micro, batch_size=size) for micro, size in pairs]
        leaves = []
        for index, leaf in enumerate(layouts[0].leaves):
            values = [layout.leaves[index].value for layout in layouts]
            if not leaf.batched:
                if isinstance(leaf.value, Tensor) and not all(map(leaf.value.equal, values)):
                    return None  # such as the edges of a graph, which count its own nodes
                leaves.append(leaf.value)
            elif isinstance(leaf.value, Tensor):
                leaves.append(torch.cat(values))
            elif isinstance(leaf.value, list):
                leaves.append([item for value in values for item in value])
            else:
                return None
        return layouts[0].structure.build(leaves)
    except (WholebatchError, RuntimeError, IndexError, TypeError):  # such as other paddings
        return None


@dataclass(eq=False)
class ModelRuns:
    """Runs one model with its optimizer and loss, each time from the same start."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Any]
    numbers: Numbers
    clip_norm: ClipNorm = None
    clip_value: float | None = None
    batchnorm: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)
    silences: list[Callable[[nn.Module], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = StartingState(self.model, self.optimizer)
        # Shards are always reduced by their backward. Read now: a forward leaves the root whole.
        self.is_sharded = any(hasattr(one, "to_local") for one in self.model.parameters())
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in self.model.named_parameters() if id(p) in trained]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.devices = [parameter.device for parameter in self.parameters]

    @property
    def inner(self) -> nn.Module:
        """Return the model without a wrapper that would reduce gradients on its own."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            module: nn.Module = self.model.module
            return module
        return self.model

    @property
    def unit(self) -> float:
        """Return the relative error of one rounding in the coarsest format that takes part."""
        return self.numbers.unit(self.model)

    def begin(self) -> None:
        """Go back to the start, with randomness off where that was asked for."""
        self.start.restore()
        for silence in self.silences:
            silence(self.model)

    def in_float64(self) -> ModelRuns:
        """Return the same runs on a copy of the model in float64."""
        self.begin()
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        model.double()
        optimizer.load_state_dict(optimizer.state_dict())  # casts its state like the parameters
        options = {k: v for k, v in self.options.items() if k != "scaler"}
        wide = replace(self, model=model, optimizer=optimizer, numbers=Numbers(), options=options)
        wide.start.random = self.start.random
        return wide

    # -------------------------------------------------------- the undivided batch

    def whole(self, batch: Any, order: Sequence[int] | None = None) -> WindowRun:
        """Make the update of the undivided batch, whose samples are in this order."""
        self.begin()
        if self.batchnorm == "freeze":  # its undivided batch is that of the changed model
            choose_batchnorm(self.batchnorm, self.model)
        with StepObserver(self.parameters) as observer:
            with self.numbers.window(self.inner):
                loss = self._backward(batch, order)
            clip(self.optimizer, self.clip_norm, self.clip_value)
            self.optimizer.step()
            return observer.run(self.start, loss)

    def in_other_orders(self, batch: DividedBatch) -> list[WindowRun]:
        """Make the update of the undivided batch in other orders: they differ by rounding."""
        return [self.whole(one, order) for one, order in batch.in_other_orders()]

    def _backward(self, batch: Any, order: Sequence[int] | None) -> float:
        """Leave the gradient of the undivided (global) batch's mean in the parameters."""
        model = self.model if self.is_sharded else self.inner
        scale = self.numbers.loss_scale
        everyone = self._global_batch(batch)
        if everyone is not None:  # every rank has the whole of it: nothing is to be added
            mean = objective(model, self.loss, everyone, self.numbers).mean()
            (mean * scale).backward()
            value = mean.detach().double()
        else:
            found = objective(model, self.loss, batch, self.numbers)
            units = sum_over_ranks(torch.tensor(found.units, dtype=torch.float64))
            mean = found.mean(units.tolist())
            if "units" not in self.options:
                # A window that does not know its units begins with a power of two. 8-bit
                # gradients depend on the factor that is in them, unless that is one.
                scale *= float(units[0]) * power_of_two_near(1.0 / float(units[0]))
            # Shards are averaged over the ranks by their own backward; that is undone here.
            (mean * (scale * world_size() if self.is_sharded else scale)).backward()
            if world_size() > 1 and not self.is_sharded:
                for parameter in self.parameters:
                    gradient = parameter.grad
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient
                    parameter.grad = sum_over_ranks(gradient)
            value = sum_over_ranks(mean.detach().double())
        if scale != 1.0:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        return float(value)

    def _global_batch(self, batch: Any) -> Any | None:
        """Return the batches of all ranks together, if BatchNorm wants the statistics of all."""
        if world_size() == 1 or not any(
            uses_batch_statistics(m) for _, m in batchnorms(self.model)
        ):
            return None
        gathered: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(gathered, to_device(batch, "cpu"))
        return joined(gathered)

    def gradients_of_terms(self, batch: Any) -> dict[str, tuple[list[Tensor | None], float]]:
        """Return, by term of the loss, the gradient of its weighted sum, and its units.

        The gradients are not divided. None is that of a parameter that is frozen or not used.
        """
        self.begin()
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        scale, by_name = self.numbers.loss_scale, {}
        with self.numbers.window(self.inner):
            found = objective(self.inner, self.loss, batch, self.numbers)
            terms = zip(found.names, found.totals, found.units, found.weights, strict=True)
            for name, total, units, weight in terms:
                made: dict[int, Tensor | None] = {}
                if total.requires_grad:  # else the term has no unit in this batch
                    again = name != found.names[-1]
                    gradients = torch.autograd.grad(
                        total * (weight * scale), trained, retain_graph=again, allow_unused=True
                    )
                    made = dict(zip(map(id, trained), gradients, strict=True))
                row = [made.get(id(parameter)) for parameter in self.parameters]
                row = [None if g is None else g.to_dense().cpu().div_(scale) for g in row]
                by_name[name] = (row, units)
        return by_name

    def draws_random_numbers(self, batch: Any) -> bool:
        """Tell if the forward of the batch moves a random generator.

        A model that gives no loss with what is switched off (a detector in evaluation mode returns
        what it has detected) has not been silenced: it counts as drawing.
        """
        self.begin()
        try:
            with torch.enable_grad():
                found = objective(self.inner, self.loss, batch, self.numbers)
        except Exception:
            if not self.silences:
                raise
            return True
        if self.silences and not any(total.requires_grad for total in found.totals):
            return True
        return not same_random(capture_random(), self.start.random)

    # ------------------------------------------------------------ in micro-batches

    def accumulated(self, batch: DividedBatch) -> WindowRun:
        """Make the update of the batch by WholeBatch, in micro-batches."""
        self.begin()
        is_undivided = self.batchnorm == "exact" and needs_whole_batch(self.inner)
        options = {
            **self.options,
            "micro_batch": batch.samples if is_undivided else batch.micro_batch,
            "batch_size": batch.batch_size,
            "static": batch.static,
            "clip_value": self.clip_value,
            "batchnorm": self.batchnorm,
        }
        if self.numbers.precision == "fp16":
            options["scaler"] = torch.amp.GradScaler(
                self.parameters[0].device.type, init_scale=self.numbers.loss_scale
            )
        train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self.loss,
            precision=self.numbers.precision,  # type: ignore[arg-type]
            clip_norm=self.clip_norm,
            audit=False,  # what couples samples is to be shown here, not refused
            **grouped(options),
        )
        if options.get("execute") in ("compile", "graph"):
            train.step(batch.whole)  # the first window makes the graphs, the second runs on them
            self.begin()
        with StepObserver(self.parameters) as observer:
            step = train.step(batch.whole)
            run = observer.run(self.start, step.loss)
        notes = (step.skipped,) if step.skipped else ()
        count = step.micro_batches
        return replace(run, notes=notes, micro_batches=count, is_undivided=is_undivided)

    def replayed(self, run: WindowRun) -> WindowRun:
        """Make the update that the optimizer makes of the gradients this run saw."""
        self.begin()
        for parameter, gradient in zip(self.parameters, run.gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
        with StepObserver(self.parameters) as observer:
            self.optimizer.step()
            return observer.run(self.start)

    def find_loss_scale(self, batch: DividedBatch) -> None:
        """Set fp16's loss scale: the largest power of two up to 2^16 that overflows nothing."""
        scale = 2.0**16
        while scale >= 1.0:
            self.numbers = replace(self.numbers, loss_scale=scale)
            if not self.accumulated(batch).notes and all(
                g is None or bool(torch.isfinite(g).all())
                for g in self.whole(batch.whole).gradients
            ):
                return
            scale /= 2.0
        raise NonFiniteError(
            "precision='fp16': the gradients are not finite at any loss scale down to 1, so there "
            "is no update to prove: verify in 'full' or 'bf16'"
        )
