"""Normalisation layers whose statistics or state depend on the batch, and replaced forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.window.replaced_attributes import replaced_attributes

BatchNorm: Any = nn.BatchNorm1d.__base__
"""The class of all BatchNorms of torch, and of those of other libraries."""
InstanceNorm: Any = nn.InstanceNorm1d.__base__
NORMS = (BatchNorm, InstanceNorm)


def batchnorms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every BatchNorm with its name: 1d to 3d, synchronised, lazy and subclasses.

    >>> [name for name, module in batchnorms(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))]
    ['1']
    """
    return [(name, m) for name, m in model.named_modules() if isinstance(m, BatchNorm)]


def tracked_instance_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every InstanceNorm whose running statistics move with every micro-batch."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, InstanceNorm) and module.track_running_stats
    ]


def uses_batch_statistics(module: nn.Module) -> bool:
    """True if this BatchNorm would now normalise with the batch it is given."""
    if module.training:
        return True
    return (
        getattr(module, "running_mean", None) is None
        and getattr(module, "running_var", None) is None
    )


def whole_batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every layer whose output or running statistics depend on how the batch is split."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm)
        or (isinstance(module, InstanceNorm) and module.track_running_stats)
    ]


def uses_whole_batch(module: nn.Module) -> bool:
    """True if this one of `NORMS` would now give other results in micro-batches."""
    if isinstance(module, BatchNorm):
        return uses_batch_statistics(module)
    return module.training and bool(module.track_running_stats)


def needs_whole_batch(model: nn.Module) -> bool:
    """True if a layer of the model trains now with the statistics of the whole batch."""
    return any(uses_whole_batch(module) for module in model.modules() if isinstance(module, NORMS))


def is_spectral_norm(module: nn.Module) -> bool:
    """True for a spectral normalisation, as a parametrisation or of the older kind."""
    if type(module).__name__ == "_SpectralNorm":
        return True
    names = (name.removesuffix("_u") for name, _ in module.named_buffers(recurse=False))
    return any(hasattr(module, f"{name}_orig") for name in names)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode within this context, one by one."""
    training = [module for model in models for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def fixed_statistics(norms: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let BatchNorms normalise without the batch in this context, so that they couple no samples.

    They use their running statistics, or a mean of 0 and a variance of 1 if they keep none.
    """
    with ExitStack() as restored:
        for _, module in norms:
            change: dict[str, Any] = {"training": False}
            if getattr(module, "running_mean", None) is None:
                change = {"forward": partial(_scale_and_shift, module)}
            restored.enter_context(replaced_attributes(module, **change))
        yield


def _scale_and_shift(module: Any, input: Tensor) -> Tensor:
    zeros = input.new_zeros(input.shape[1])
    return F.batch_norm(input, zeros, zeros + 1, module.weight, module.bias, eps=module.eps)
