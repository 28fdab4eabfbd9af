"""Which layers let one sample's output depend on the other samples of its batch.

Such a layer makes plain accumulation wrong without a word: BatchNorm by a third to two thirds of
the gradient. `audit` finds them by their type and, when it is given a batch, by changing one sample
and looking at whose outputs move: that finds what no list of types can know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.core.splitting import to_device
from wholebatch.core.splitting.samples import BatchSize, Static
from wholebatch.coupled.adds_up import AddsUp
from wholebatch.coupled.finding import Finding
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    is_spectral_norm,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.errors import LossError

__all__ = ["Audit", "Finding", "audit"]

_POLICIES = (
    'WholeBatch(batchnorm="exact") is exact; Accumulator needs "statistics", "freeze", "group", '
    '"layer" or "sync"'
)
_ADVICE = {
    "batchnorm": f"normalises with the statistics of the batch: {_POLICIES}",
    "custom": (
        "a BatchNorm of its own kind: exact if it calls F.batch_norm, refused by name otherwise; "
        f"{_POLICIES}"
    ),
    "sync": (
        "normalises with the statistics of the micro-batch on all ranks, not of the window: "
        'WholeBatch(batchnorm="exact") includes the ranks; "sync" keeps it as it is'
    ),
    "running": (
        "outputs do not depend on other samples, but the running statistics move once for every "
        'micro-batch: batchnorm="exact" or "statistics" moves them once per window'
    ),
    "ghost": (
        "splits its batch by itself and normalises the parts (Ghost BatchNorm): statistics of the "
        "whole batch are not what it wants. Use a plain BatchNorm, or plain accumulation in "
        'micro-batches of its parts: batchnorm="statistics", audit=False'
    ),
    "spectral": (
        "one power iteration for every forward in training: it moves once per micro-batch, not "
        "once per update; in evaluation mode it stays as it is"
    ),
}


_BY_TYPE = ("batchnorm", "custom", "sync")
_BEYOND = (
    "probe",
    "loss",
    "ghost",
    "state",
    "outside",
    "mean",
    "sum",
    "added",
    "units",
    "gradient",
)
_COUPLES = (*_BY_TYPE, "running", "spectral", "ghost", "probe")


@dataclass(frozen=True, slots=True)
class Audit:
    """What keeps micro-batches from the update of the whole batch; true if anything does."""

    findings: tuple[Finding, ...]
    probed: bool

    def __bool__(self) -> bool:
        return bool(self.findings)

    @property
    def beyond_batchnorm(self) -> tuple[Finding, ...]:
        """What no BatchNorm policy can make exact."""
        return tuple(finding for finding in self.findings if finding.kind in _BEYOND)

    def __str__(self) -> str:
        how = "by type and by changing one sample" if self.probed else "by type"
        if not self.findings:
            return f"no layer couples the samples of a batch ({how})"
        layers = sum(finding.kind in _COUPLES for finding in self.findings)
        what = [f"{layers} layers couple" if layers > 1 else "1 layer couples"] if layers else []
        if any(finding.kind == "loss" for finding in self.findings):
            what = [f"{layers} layers and the loss couple" if layers else "this loss couples"]
        what = [f"{one} the samples of a batch ({how})" for one in what]
        if any(finding.kind not in (*_COUPLES, "loss") for finding in self.findings):
            what.append("micro-batches do not add up to the whole batch")
        return "\n  ".join([f"{'; '.join(what)}:", *map(str, self.findings)])


def audit(
    model: nn.Module,
    batch: Any = None,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    batch_size: BatchSize = None,
    static: Static = (),
) -> Audit:
    """Return what keeps micro-batches of `model` from the update of the whole batch.

    Layers are looked at as they are now: a BatchNorm in evaluation mode couples nothing and is not
    reported. With a `batch` the model also runs on its first samples (8 at most): with one of them
    changed, to see which layers mix samples, and in halves, to see whether what comes and its
    gradient add up and which state a forward moves. `forward(model, batch)` says how the model is
    called (default: with the batch, or with its items as keywords or positions). It may be a loss
    function: then one that compares samples, or gives a mean as a sum, is found. `batch_size` and
    `static` say how the batch is to be read, as in `WholeBatch`. Parameters, gradients, buffers,
    attributes of modules and random generators are left as found.

    >>> import torch
    >>> print(audit(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), torch.randn(4, 2)))
    no layer couples the samples of a batch (by type and by changing one sample)
    """
    findings = tuple(_by_type(model))
    if batch is None:
        return Audit(findings, probed=False)
    known = {finding.name for finding in findings if finding.kind in _BY_TYPE}
    options: dict[str, Any] = {"batch_size": batch_size, "static": static}
    return Audit((*findings, *_by_running(model, batch, forward, known, options)), probed=True)


def _by_running(
    model: nn.Module,
    batch: Any,
    forward: Callable[[Any, Any], Any] | None,
    known: Collection[str],
    options: Mapping[str, Any],
) -> tuple[Finding, ...]:
    first = next(model.parameters(), None)
    call = _call if forward is None else forward

    def run(few: Any) -> Any:
        return call(model, few if first is None else to_device(few, first.device))

    options = {**options, "name": getattr(forward, "__name__", "a function")}
    look = AddsUp(model)
    layers = look.layers(run, batch, known=known, **options)
    try:
        found = look.look(run, batch, outputs=forward is None, **options).findings
    except LossError:  # not a loss: outputs
        found = look.look(run, batch, outputs=True, **options).findings
    # Where a layer couples samples, nothing adds up: that is no news.
    return (*layers, *(f for f in found if f.kind in ("state", "outside"))) if layers else found


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _by_type(model: nn.Module) -> Iterator[Finding]:
    for name, module in batchnorms(model):
        if uses_batch_statistics(module):
            kind = _kind(module)
            yield Finding(name, type(module).__name__, kind, _ADVICE[kind])
    for name, module in tracked_instance_norms(model):
        if module.training:
            yield Finding(name, type(module).__name__, "running", _ADVICE["running"])
    for name, module in model.named_modules():
        if module.training and _is_ghost(module):
            yield Finding(name, type(module).__name__, "ghost", _ADVICE["ghost"])
        if module.training and is_spectral_norm(module):
            yield Finding(name, type(module).__name__, "spectral", _ADVICE["spectral"])


def _is_ghost(module: nn.Module) -> bool:
    """By what such layers are called, and by TabNet's name for the size of their parts."""
    named = "ghost" in type(module).__name__.lower() or hasattr(module, "virtual_batch_size")
    below = isinstance(module, _BatchNorm) or any(
        isinstance(child, _BatchNorm) for child in module.children()
    )
    return named and below


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "sync"
    return "batchnorm" if type(module).forward is _BatchNorm.forward else "custom"
