"""The gradient of the undivided batch, and a loop's distance from it in its first update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.splitting import to_device
from wholebatch.tune.loop_comparison.training_job import Job

__all__ = ["Reference"]

_ALIKE = 1e-3
"""Two gradients of one batch that differ by more were made with random numbers."""


class Reference:
    """The gradients of the undivided batch by parameter name, in host memory."""

    def __init__(self, job: Job) -> None:
        self._gradients: dict[str, Tensor] = {}
        self.why: str | None = None
        """The reason why nothing can be compared, or None."""
        try:
            first, second = _whole(job, seed=0), _whole(job, seed=1)
        except torch.OutOfMemoryError:
            self.why = "the undivided batch does not fit in memory: updates are not compared"
            return
        if _distance(first, second) > _ALIKE:
            self.why = "the model draws random numbers: updates are not compared"
            return
        self._gradients = first

    @contextlib.contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[float]]:
        """Yield a list that receives the distance of the first step's gradient."""
        found: list[float] = []

        def compare() -> None:
            if not found and self._gradients:
                found.append(_distance(_gradients_of(model), self._gradients))

        def before_step(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            closure = given[1] if len(given) > 1 else named.get("closure")
            if closure is None:
                compare()
                return None

            def watched() -> Any:  # Some frameworks run the last backward only in the closure.
                result = closure()
                compare()
                return result

            if len(given) > 1:
                return (given[0], watched, *given[2:]), named
            return given, {**named, "closure": watched}

        handle = optimizer.register_step_pre_hook(before_step)
        try:
            yield found
        finally:
            handle.remove()


def _whole(job: Job, *, seed: int) -> dict[str, Tensor]:
    model, _ = job.make()
    torch.manual_seed(seed)
    with job.autocast():
        loss = job.mean(model, to_device(job.first, job.device))
    loss.backward()
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    return _gradients_of(model)


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().to("cpu", torch.float32, copy=True)
        if parameter.grad.dtype.itemsize < 4
        else parameter.grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.is_sparse
    }


def _distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the relative distance over all parameters; a missing gradient counts as zero."""
    off = norm = 0.0
    for name in found.keys() | right.keys():
        one, other = found.get(name), right.get(name)
        difference = other if one is None else one if other is None else one - other
        assert difference is not None
        off += float(difference.double().square().sum())
        norm += 0.0 if other is None else float(other.double().square().sum())
    return float((off / norm) ** 0.5) if norm else float("nan")
