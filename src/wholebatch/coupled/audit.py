"""Which layers let one sample's output depend on the other samples of its batch.

Such a layer makes plain accumulation wrong without a word: BatchNorm by a third to two thirds of
the gradient. `audit` finds them by their type and, when it is given a batch, by changing one sample
and looking at whose outputs move: that finds what no list of types can know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wholebatch.coupled.probe import FUNCTION, Probe
from wholebatch.splitting.layout import BatchSize, Static

__all__ = [
    "Audit",
    "Finding",
    "audit",
    "audit_layers",
    "batchnorms",
    "tracked_instance_norms",
    "uses_batch_statistics",
]

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
    "probe": (
        "output for one sample moved when another sample changed, for a reason its type does not "
        "tell: no micro-batch can give it the whole batch. If it calls F.batch_norm, make that an "
        "nn.BatchNorm inside it, which is exact; else compute it per sample, or move it into the "
        "loss of wb.Coupled(encode, loss), which sees the whole batch"
    ),
}


_BY_TYPE = ("batchnorm", "custom", "sync")
_BEYOND = ("probe", "loss", "ghost")


@dataclass(frozen=True, slots=True)
class Finding:
    """One layer: its name in the model, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'} ({self.type}): {self.advice}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What couples the samples of a batch in a model; true if anything does."""

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
        number = len(self.findings)
        what = "1 layer couples" if number == 1 else f"{number} layers couple"
        if any(finding.kind == "loss" for finding in self.findings):
            what = (
                "this loss couples" if number == 1 else f"{number - 1} layers and the loss couple"
            )
        lines = [f"{what} the samples of a batch ({how}):"]
        return "\n  ".join([*lines, *map(str, self.findings)])


def batchnorms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every BatchNorm with its name: 1d to 3d, synchronised, lazy and subclasses.

    >>> [name for name, module in batchnorms(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))]
    ['1']
    """
    return [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]


def tracked_instance_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every InstanceNorm that keeps running statistics: they move with every micro-batch."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _InstanceNorm) and module.track_running_stats
    ]


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether this BatchNorm would now normalise with the batch it is given."""
    if module.training:
        return True
    return (
        getattr(module, "running_mean", None) is None
        and getattr(module, "running_var", None) is None
    )


def audit(
    model: nn.Module,
    batch: Any = None,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    batch_size: BatchSize = None,
    static: Static = (),
    parts: int = 1,
) -> Audit:
    """The layers of `model` that couple the samples of a batch.

    Layers are looked at as they are now: a BatchNorm in evaluation mode couples nothing and is not
    reported. With a `batch` the model is also probed: it runs on its first samples (8 at most)
    without gradients, then again with one of them changed, three times in all. `forward(model,
    batch)` says how the model is called (default: with the batch, or with its items as keywords or
    positions). It may be a loss function: then the loss of those samples is also held against that
    of their halves, and one that compares samples with each other is found. `batch_size` and
    `static` say how the batch is to be read, as in `WholeBatch`; of a batch that memory holds only
    in `parts`, at most three times as many samples are run as one part has. Buffers and random
    generators are left as found.

    >>> import torch
    >>> print(audit(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), torch.randn(4, 2)))
    no layer couples the samples of a batch (by type and by changing one sample)
    """
    findings = list(_by_type(model))
    if batch is not None:
        loss = forward is not None
        findings += _by_probe(model, batch, forward, batch_size, static, parts, findings, loss=loss)
    return Audit(tuple(findings), probed=batch is not None)


def audit_layers(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[Any, Any], Any],
    batch_size: BatchSize,
    static: Static,
    parts: int,
) -> Audit:
    """The same without a look at the loss itself: no more forwards, and none with a graph."""
    known = list(_by_type(model))
    found = _by_probe(model, batch, forward, batch_size, static, parts, known, loss=False)
    return Audit((*known, *found), probed=True)


def _by_probe(
    model: nn.Module,
    batch: Any,
    forward: Callable[[Any, Any], Any] | None,
    batch_size: BatchSize,
    static: Static,
    parts: int,
    by_type: Sequence[Finding],
    *,
    loss: bool,
) -> list[Finding]:
    first = next(model.parameters(), None)
    probe = Probe(
        model,
        batch,
        device=None if first is None else first.device,
        norms=[(name, norm) for name, norm in batchnorms(model) if uses_batch_statistics(norm)],
        forward=forward,
        batch_size=batch_size,
        static=static,
        parts=parts,
    )
    known = {finding.name for finding in by_type if finding.kind in _BY_TYPE}
    named = dict(model.named_modules())
    function = getattr(forward, "__name__", "a function")
    found = [
        Finding(
            name,
            function if name == FUNCTION else type(named[name]).__name__,
            "probe",
            _ADVICE["probe"],
        )
        for name in probe.moved_by_another_sample(known)
    ]
    apart = probe.loss_apart() if loss and not found else None
    if apart is not None:
        found.append(Finding("(the loss function)", function, "loss", str(apart)))
    return found


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
        if module.training and _iterates(module):
            yield Finding(name, type(module).__name__, "spectral", _ADVICE["spectral"])


def _is_ghost(module: nn.Module) -> bool:
    """By what such layers are called, and by TabNet's name for the size of their parts."""
    named = "ghost" in type(module).__name__.lower() or hasattr(module, "virtual_batch_size")
    below = isinstance(module, _BatchNorm) or any(
        isinstance(child, _BatchNorm) for child in module.children()
    )
    return named and below


def _iterates(module: nn.Module) -> bool:
    """Whether this is a spectral normalisation, as a parametrisation or of the older kind."""
    hooks = module._forward_pre_hooks.values()
    return type(module).__name__ == "_SpectralNorm" or any(
        type(hook).__name__ == "SpectralNorm" for hook in hooks
    )


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "sync"
    return "batchnorm" if type(module).forward is _BatchNorm.forward else "custom"


def running_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a normalisation layer's training-mode forward moves."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    found = {name: getattr(module, name, None) for name in names}
    return {name: buffer for name, buffer in found.items() if isinstance(buffer, Tensor)}
