"""Layers that are known to let one sample depend on others, by a look at the modules."""

from __future__ import annotations

import logging

from torch import nn

from wholebatch.audit.finding import AuditFinding
from wholebatch.coupled.normalisation_layers import (
    BatchNorm,
    batchnorms,
    is_spectral_norm,
    tracked_instance_norms,
    uses_batch_statistics,
)

_log = logging.getLogger("wholebatch")

_POLICIES = (
    'WholeBatch(batchnorm="exact") is exact; Accumulator needs "freeze", "allow" or GroupNorm'
)
_ADVICE = {
    "batchnorm": f"normalises with the statistics of the batch: {_POLICIES}",
    "custom": f"a BatchNorm with a custom forward: {_POLICIES}",
    "sync": f"normalises with the statistics of the micro-batch on all ranks: {_POLICIES}",
    "running": f"its running statistics move once for every micro-batch: {_POLICIES}",
    "frequency": (
        "scale_grad_by_freq=True divides the gradient of a row by how often it occurs in the "
        "micro-batch, not in the batch: leave it out"
    ),
    "spectral": (
        "runs one power iteration in every forward in training: its state changes once per "
        "micro-batch, not once per update; in evaluation mode it does not change"
    ),
}


def layers_by_type(model: nn.Module) -> list[AuditFinding]:
    """Return the layers that couple samples or move with each micro-batch, in their mode."""
    layers = [(name, m, _kind(m)) for name, m in batchnorms(model) if uses_batch_statistics(m)]
    layers += [(name, m, "running") for name, m in tracked_instance_norms(model) if m.training]
    for name, module in model.named_modules():
        scales = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
        if scales and module.weight.requires_grad:
            layers.append((name, module, "frequency"))
        if module.training and is_spectral_norm(module):
            layers.append((name, module, "spectral"))
    return [
        AuditFinding(name, type(module).__name__, kind, _ADVICE[kind])
        for name, module, kind in layers
    ]


def refused_by_type(model: nn.Module) -> list[AuditFinding]:
    """Return the layers that no policy makes right in micro-batches."""
    return [finding for finding in layers_by_type(model) if finding.kind == "frequency"]


def warn_of_spectral_norms(model: nn.Module) -> None:
    """Warn of spectral normalisations, which move once per micro-batch."""
    for finding in layers_by_type(model):
        if finding.kind == "spectral":
            _log.warning("%s", finding)


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "sync"
    return "batchnorm" if type(module).forward is BatchNorm.forward else "custom"
