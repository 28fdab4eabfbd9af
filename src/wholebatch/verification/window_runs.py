"""The bench on which a proof is made: whole and accumulated windows from one start, observed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import ClipNorm
from wholebatch.core.forward_state import capture_random
from wholebatch.core.options import grouped
from wholebatch.core.splitting import to_device
from wholebatch.core.splitting.samples import flatten
from wholebatch.core.whole_batch import WholeBatch
from wholebatch.coupled import batchnorms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.errors import NonFiniteError
from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.observed_window import Run, Watch
from wholebatch.verification.rejoined_batch import joined
from wholebatch.verification.starting_state import Start
from wholebatch.verification.undivided_batch import (
    Numbers,
    Objective,
    add_over_ranks,
    clip,
    objective,
    ranks,
    sharded,
)

__all__ = ["Bench", "in_other_orders", "wide_batch"]

# These policies change what the model is; its undivided batch is that of the changed model.
_CHANGES_THE_MODEL = ("freeze", "group", "layer")


class Bench:
    """One model with its optimizer and loss; each run begins from the same start."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Any],
        *,
        numbers: Numbers,
        clip_norm: ClipNorm = None,
        clip_value: float | None = None,
        batchnorm: str = "exact",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.numbers = numbers
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.batchnorm = batchnorm
        self.options = dict(options or {})
        self.start = Start(model, optimizer)
        self.is_sharded = sharded(model)  # now: a forward leaves the root's parameters whole
        self.silences: list[Callable[[nn.Module], None]] = []
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in model.named_parameters() if id(p) in trained]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.devices = [parameter.device for parameter in self.parameters]

    @property
    def inner(self) -> nn.Module:
        """The model without a wrapper that would reduce gradients on its own."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            module: nn.Module = self.model.module
            return module
        return self.model

    def begin(self) -> None:
        """Back to the start, with randomness off where that was asked for."""
        self.start.restore()
        for silence in self.silences:
            silence(self.model)

    def with_loss(self, loss: Callable[[Any, Any], Any]) -> Bench:
        """The same bench, from the same start, with another loss; no graph is compiled for it."""
        other = copy.copy(self)
        other.loss = loss
        other.silences = list(self.silences)
        other.options = {name: v for name, v in self.options.items() if name != "execute"}
        return other

    def whole(self, batch: Any) -> Run:
        """The update of the undivided batch."""
        self.begin()
        if self.batchnorm in _CHANGES_THE_MODEL:
            choose_batchnorm(self.batchnorm, self.model)
        with Watch(self.model, self.parameters) as watch:
            loss = self.backward(batch)
            clip(self.optimizer, self.clip_norm, self.clip_value)
            self.optimizer.step()
            return watch.run(self.start, loss)

    def backward(self, batch: Any) -> float:
        """Leave the gradient of the undivided (global) batch's mean in the parameters."""
        model = self.model if self.is_sharded else self.inner
        everyone = self._global_batch(batch)
        found = objective(model, self.loss, everyone or batch, self.numbers)
        scale = self.numbers.loss_scale
        if everyone is not None:  # every rank has the whole of it: nothing is to be added
            mean = found.mean()
            (mean * scale).backward()
        else:
            device = self.parameters[0].device
            units = torch.tensor([*found.units], dtype=torch.float64, device=device)
            add_over_ranks([units])
            mean = found.mean(units.tolist())
            # Shards are averaged over the ranks by their own backward; that is undone here.
            (mean * (scale * ranks() if self.is_sharded else scale)).backward()
            if ranks() > 1 and not self.is_sharded:
                for parameter in self.parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                add_over_ranks([p.grad for p in self.parameters if p.grad is not None])
        value = mean.detach().double()
        if everyone is None:
            add_over_ranks([value])
        if scale != 1.0:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        return float(value)

    def _global_batch(self, batch: Any) -> Any | None:
        """The batches of all ranks together, where BatchNorm wants the statistics of all."""
        if ranks() == 1 or not any(uses_batch_statistics(m) for _, m in batchnorms(self.model)):
            return None
        gathered: list[Any] = [None] * ranks()
        torch.distributed.all_gather_object(gathered, to_device(batch, "cpu"))
        return joined(gathered)

    def accumulated(self, batch: Any, micro_batch: Any, reading: Reading) -> Run:
        """The update that WholeBatch makes of it in micro-batches."""
        self.begin()
        options = dict(self.options)
        if self.numbers.precision == "fp16":
            options["scaler"] = torch.amp.GradScaler(
                self.parameters[0].device.type, init_scale=self.numbers.loss_scale
            )
        flat = {
            **options,
            "micro_batch": micro_batch,
            "batch_size": reading.batch_size,
            "static": reading.static,
            "clip_value": self.clip_value,
            "batchnorm": self.batchnorm,
        }
        train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self.loss,
            precision=self.numbers.precision,
            clip_norm=self.clip_norm,
            audit=False,  # what couples samples is to be shown here, not refused
            **grouped(flat),
        )
        if options.get("execute") in ("compile", "graph"):
            train.step(batch)  # the first window makes the graphs, the second runs on them
            self.begin()
        with Watch(self.model, self.parameters) as watch:
            step = train.step(batch)
            run = watch.run(self.start, step.loss)
            if options.get("gradients", "device") != "device":
                run = run.joined()
        return replace(run, notes=(step.skipped,) if step.skipped else ())

    def objective_of(self, batch: Any) -> Objective:
        """One forward from the start; its graph is alive."""
        self.begin()
        return objective(self.inner, self.loss, batch, self.numbers)

    def gradient_of(self, batch: Any) -> tuple[list[Tensor | None], tuple[float, ...]]:
        """The gradient of a batch's weighted sums (not divided), and their units."""
        found = self.objective_of(batch)
        total = sum(
            (total * weight for total, weight in zip(found.totals, found.weights, strict=True)),
            start=found.totals[0].new_zeros(()),
        )
        scale = self.numbers.loss_scale
        gradients = torch.autograd.grad(total * scale, self.parameters, allow_unused=True)
        return [
            None if g is None else g.to_dense().cpu().div_(scale) for g in gradients
        ], found.units

    def draws_random_numbers(self, batch: Any) -> bool:
        """Whether the forward of the batch moves a random generator.

        A model that gives no loss with what is switched off (a detector in evaluation mode returns
        what it has detected) has not been silenced: it is said to draw.
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
        return not _equal(capture_random(), self.start.random)

    def replayed(self, run: Run) -> Run:
        """The update that the optimizer makes of the gradients this run saw."""
        self.begin()
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, run.gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient.to(parameter.device, parameter.dtype)
        with Watch(self.model, self.parameters) as watch:
            self.optimizer.step()
            return watch.run(self.start)

    def in_float64(self) -> Bench:
        """The same bench on a copy of the model in float64."""
        self.begin()
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        model.double()
        optimizer.load_state_dict(optimizer.state_dict())  # casts its state like the parameters
        wide = Bench(
            model,
            optimizer,
            self.loss,
            numbers=Numbers(),
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            batchnorm=self.batchnorm,
            options={k: v for k, v in self.options.items() if k != "scaler"},
        )
        wide.start.random = self.start.random
        return wide

    def find_loss_scale(self, batch: Any, micro_batch: Any, reading: Reading) -> None:
        """fp16: the largest power of two, from 2^16 down, at which nothing overflows."""
        scale = 2.0**16
        while scale >= 1.0:
            self.numbers = replace(self.numbers, loss_scale=scale)
            run = self.accumulated(batch, micro_batch, reading)
            if not run.notes and all(
                g is None or bool(torch.isfinite(g).all()) for g in self.whole(batch).gradients
            ):
                return
            scale /= 2.0
        raise NonFiniteError(
            "precision='fp16': the gradients are not finite at any loss scale down to 1, so there "
            "is no update to prove: verify in 'full' or 'bf16'"
        )


def in_other_orders(bench: Bench, batch: Any, reading: Reading) -> list[Run]:
    """The undivided batch with its samples reversed, and shuffled: what rounding alone does."""
    samples = reading.size(batch)
    generator = torch.Generator().manual_seed(0)
    orders = [list(reversed(range(samples))), torch.randperm(samples, generator=generator).tolist()]
    return [bench.whole(reading.permuted(batch, order)) for order in orders]


def wide_batch(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    leaves, structure = flatten(batch)
    return structure.build([_wide(leaf.value) for leaf in leaves])


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def _equal(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor):
        return isinstance(before, Tensor) and torch.equal(now, before)
    if isinstance(now, Mapping):
        return now.keys() == before.keys() and all(_equal(now[k], before[k]) for k in now)
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(_equal, now, before))
    return bool(now == before)
