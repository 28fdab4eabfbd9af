"""Observed runs of one model from the same start: the undivided batch, and its micro-batches.

The undivided batch runs by plain torch: forward, backward, clip, step, and no engine in it. Under
data-parallel ranks the batch is the global one: every rank runs its own part undivided, and the
gradients of the sums are added over the ranks and divided by the units of all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholebatch.batch import to_device
from wholebatch.coupled import batchnorms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.normalisation_layers import needs_whole_batch, uses_batch_statistics
from wholebatch.distributed.process_group import of_all_ranks, sum_over_ranks, world_size
from wholebatch.errors import NonFiniteError
from wholebatch.losses.loss import Term, as_loss, terms_of, wide
from wholebatch.options import Close, Samples
from wholebatch.verification.distances import Scale
from wholebatch.verification.divided_batch import DividedBatch, whole_of
from wholebatch.verification.starting_state import StartingState, dense
from wholebatch.whole_batch import WholeBatch
from wholebatch.window.close import power_of_two_near
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.forward_state import capture_random, same_random
from wholebatch.window.precision import choose

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TF32 = 2.0**-11
"""The error of one rounding to TensorFloat-32, which CUDA devices may multiply float32 in."""


def rounding_unit(model: nn.Module, precision: str) -> float:
    """Return the relative error of one rounding in the coarsest format that takes part."""
    formats = [parameter.dtype.to_real() for parameter in model.parameters()]
    if precision != "full":
        formats.append(AUTOCAST.get(precision, torch.bfloat16))
    unit = max(torch.finfo(dtype).eps / 2 for dtype in formats)
    return max(unit, _TF32) if torch.float32 in formats and _uses_tf32(model) else unit


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


def _mean(terms: Mapping[str, Term], units: Sequence[float] | None = None) -> Tensor:
    """Return the sum of weight × total / units over the terms; `units` replaces their own."""
    over = [float(term.units) for term in terms.values()] if units is None else units
    parts = [  # a wide total: its division adds no rounding of its own
        wide(term.total) * (term.weight / count if count else 0.0)
        for term, count in zip(terms.values(), over, strict=True)
    ]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@torch.no_grad()
def _clip(optimizer: torch.optim.Optimizer, norm: ClipNorm, value: float | None) -> None:
    """Clip the gradients with torch's own functions."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    together = [parameter for group in groups for parameter in group]
    if value is not None:
        nn.utils.clip_grad_value_(together, value)
    if norm is None:
        return
    limits, groups = (norm, groups) if isinstance(norm, Sequence) else ([norm], [together])
    for group, limit in zip(groups, limits, strict=True):
        if limit is not None:
            total = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            # The norm of shards is a partial one, to which torch would add its 1e-6 on each rank.
            total = total.full_tensor() if hasattr(total, "full_tensor") else total
            nn.utils.clip_grads_with_norm_(group, limit, total)


@dataclass(frozen=True)
class WindowRun:
    """One window, observed: the gradients at its step and the change of every parameter."""

    gradients: tuple[Tensor | None, ...]
    update: tuple[Tensor, ...]
    loss: float | None = None
    skipped: bool = False
    micro_batches: int = 1
    is_undivided: bool = False


@dataclass(eq=False)
class ModelRuns:
    """Runs one model with its optimizer and loss, each time from the same start."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Any]
    precision: str = "full"
    loss_scale: float = 1.0
    """That of fp16."""
    clip_norm: ClipNorm = None
    close: Close = field(default_factory=Close)
    batchnorm: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)
    silences: list[Callable[[nn.Module], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # With "freeze", the undivided batch too is that of the frozen model.
        policy = self.batchnorm if self.batchnorm == "freeze" else "allow"
        self.policy = choose_batchnorm(policy, self.model)
        self.start = StartingState(self.model, self.optimizer)
        # Shards are always reduced by their backward. Read now: a forward leaves the root whole.
        self.is_sharded = any(hasattr(p, "to_local") for p in self.model.parameters())
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in self.model.named_parameters() if id(p) in trained]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.device = next(self.model.parameters()).device

    @property
    def inner(self) -> nn.Module:
        """Return the model without a wrapper that would reduce gradients on its own."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            module: nn.Module = self.model.module
            return module
        return self.model

    @property
    def scale(self) -> Scale:
        """Return what distances of these runs are measured by."""
        devices = [parameter.device for parameter in self.parameters]
        return Scale(self.names, devices, rounding_unit(self.model, self.precision))

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
        wide = replace(
            self,
            model=model,
            optimizer=optimizer,
            precision="full",
            loss_scale=1.0,
            close=replace(self.close, scaler=None),
        )
        wide.start.forward.random = self.start.forward.random
        return wide

    @contextmanager
    def _observed(self) -> Iterator[list[Tensor | None]]:
        """Yield the gradients at a step on these parameters, or at steps on a few at a time."""
        gradients: list[Tensor | None] = [None] * len(self.parameters)

        def see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
            over = 1.0 if scale is None else float(scale)
            its_own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for place, parameter in enumerate(self.parameters):
                if id(parameter) in its_own:
                    grad = parameter.grad
                    gradient = None if grad is None else dense(grad).to("cpu", copy=True).div_(over)
                    gradients[place] = gradient

        hook = register_optimizer_step_pre_hook(see)
        try:
            yield gradients
        finally:
            hook.remove()

    def _run(self, gradients: Sequence[Tensor | None], **more: Any) -> WindowRun:
        return WindowRun(tuple(gradients), self.start.update(self.parameters), **more)

    # -------------------------------------------------------- the undivided batch

    def whole(self, batch: Any) -> WindowRun:
        """Make the update of the undivided batch."""
        self.begin()
        with self._observed() as gradients:
            with choose(self.precision, self.device.type).window():
                loss = self._backward(batch)
            _clip(self.optimizer, self.clip_norm, self.close.clip_value)
            self.optimizer.step()
            return self._run(gradients, loss=loss)

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Term]:
        """Run one forward of the batch as it is; return the terms of its loss."""
        with choose(self.precision, self.device.type).forward():
            return terms_of(as_loss(self.loss(model, to_device(batch, self.device))))

    def _backward(self, batch: Any) -> float:
        """Leave the gradient of the undivided (global) batch's mean in the parameters."""
        model = self.model if self.is_sharded else self.inner
        scale = self.loss_scale
        everyone = self._global_batch(batch)
        if everyone is not None:  # every rank has the whole of it: nothing is to be added
            mean = _mean(self.terms(model, everyone))
            (mean * scale).backward()
            value = mean.detach().double()
        else:
            terms = self.terms(model, batch)
            own = [float(term.units) for term in terms.values()]
            units = sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
            mean = _mean(terms, units)
            if len(units) == 1 and units[0]:
                # The seed of a window is a power of two. 8-bit gradients depend on the factor that
                # is in them, unless that is one.
                scale *= units[0] * power_of_two_near(1.0 / units[0])
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
        norms = [module for _, module in batchnorms(self.model)]
        if world_size() == 1 or not any(map(uses_batch_statistics, norms)):
            return None
        return whole_of(of_all_ranks(to_device(batch, "cpu")))

    def draws_random_numbers(self, batch: Any) -> bool:
        """Tell if the forward of the batch moves a random generator.

        A model that gives no loss with what is switched off (a detector in evaluation mode returns
        what it has detected) has not been silenced: it counts as drawing.
        """
        self.begin()
        terms: dict[str, Term] = {}
        with suppress(Exception) if self.silences else torch.enable_grad(), torch.enable_grad():
            terms = self.terms(self.inner, batch)
        if self.silences and not any(term.total.requires_grad for term in terms.values()):
            return True
        return not same_random(capture_random(), self.start.forward.random)

    # ------------------------------------------------------------ in micro-batches

    def accumulated(self, batch: DividedBatch) -> WindowRun:
        """Make the update of the batch by WholeBatch, in micro-batches."""
        self.begin()
        is_undivided = self.batchnorm == "exact" and needs_whole_batch(self.inner)
        size, close = batch.samples if is_undivided else batch.micro_batch, self.close
        if self.precision == "fp16":
            scaler = torch.amp.GradScaler(self.device.type, init_scale=self.loss_scale)
            close = replace(close, scaler=scaler)
        train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self.loss,
            precision=self.precision,  # type: ignore[arg-type]
            clip_norm=self.clip_norm,
            audit=False,  # what couples samples is to be shown here, not refused
            micro_batch=Samples(size, batch.batch_size, batch.static),
            batchnorm=self.batchnorm,  # type: ignore[arg-type]
            close=close,
            **self.options,
        )
        if self.options.get("execute") in ("compile", "graph"):
            train.step(batch.whole)  # the first window makes the graphs, the second runs on them
            self.begin()
        with self._observed() as gradients:
            step = train.step(batch.whole)
            return self._run(
                gradients,
                loss=step.loss,
                skipped=bool(step.skipped),
                micro_batches=step.micro_batches,
                is_undivided=is_undivided,
            )

    def replayed(self, run: WindowRun) -> WindowRun:
        """Make the update that the optimizer makes of the gradients this run saw."""
        self.begin()
        for parameter, gradient in zip(self.parameters, run.gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
        with self._observed() as gradients:
            self.optimizer.step()
            return self._run(gradients)

    def find_loss_scale(self, batch: DividedBatch) -> None:
        """Set fp16's loss scale: the largest power of two up to 2^16 that overflows nothing."""
        self.loss_scale = 2.0**16
        while self.loss_scale >= 1.0:
            if not self.accumulated(batch).skipped and all(
                g is None or bool(torch.isfinite(g).all())
                for g in self.whole(batch.whole).gradients
            ):
                return
            self.loss_scale /= 2.0
        raise NonFiniteError(
            "precision='fp16': the gradients are not finite at any loss scale down to 1, so there "
            "is no update to prove: verify in 'full' or 'bf16'"
        )
