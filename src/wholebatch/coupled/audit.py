"""Find the layers that let one sample's output depend on the other samples of its batch.

Such a layer makes plain accumulation silently wrong: BatchNorm by a third to two thirds of
the gradient. `audit` finds them by their type and, when it is given a batch, by changing one sample
and looking at whose outputs move: that finds what no list of types can know. `SplitGuard` does both
before the first window that is split, so that no such model is trained unnoticed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.batch import Tokens, to_device
from wholebatch.batch.micro_batches import lengths_of, without_padding
from wholebatch.batch.packing import alone
from wholebatch.batch.samples import Layout, readable_layout
from wholebatch.coupled.adds_up import SAMPLES, check_adds_up
from wholebatch.coupled.causes import AuditFinding, layers_that_couple
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    evaluation_mode,
    is_spectral_norm,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.coupled.sample_runs import CalledModules, FirstSamples
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.forward_state import ForwardState

_log = logging.getLogger("wholebatch")

_POLICIES = (
    'WholeBatch(batchnorm="exact") is exact; Accumulator needs "freeze" or "allow", or GroupNorm'
)
_ADVICE = {
    "batchnorm": f"normalises with the statistics of the batch: {_POLICIES}",
    "custom": (f"a BatchNorm with a forward of its own: {_POLICIES}"),
    "sync": (
        "normalises with the statistics of the micro-batch on all ranks, not of the window: "
        'WholeBatch(batchnorm="exact") includes the ranks'
    ),
    "running": (
        "outputs do not depend on other samples, but the running statistics move once for every "
        'micro-batch: WholeBatch(batchnorm="exact") moves them once per window'
    ),
    "ghost": (
        "splits its batch by itself and normalises the parts (Ghost BatchNorm): statistics of the "
        "whole batch are not what it wants. Use a plain BatchNorm, or plain accumulation in "
        'micro-batches of its parts: batchnorm="allow", audit=False'
    ),
    "frequency": (
        "scale_grad_by_freq=True divides the gradient of a row by how often it occurs in the "
        "micro-batch, not in the batch: leave it out"
    ),
    "spectral": (
        "one power iteration for every forward in training: it moves once per micro-batch, not "
        "once per update; in evaluation mode it stays as it is"
    ),
}
_BY_TYPE = ("batchnorm", "custom", "sync")
_LAYERS = (*_ADVICE, "probe")


@dataclass(frozen=True, slots=True)
class Audit:
    """The findings that keep micro-batches from the update of the whole batch; true if any do."""

    findings: tuple[AuditFinding, ...]
    probed: bool

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        how = "by type and by changing one sample" if self.probed else "by type"
        if not self.findings:
            return f"no layer couples the samples of a batch ({how})"
        layers = sum(finding.kind in _LAYERS for finding in self.findings)
        what = [f"{layers} layers couple" if layers > 1 else "1 layer couples"] if layers else []
        if any(finding.kind == "loss" for finding in self.findings):
            what = [f"{layers} layers and the loss couple" if layers else "this loss couples"]
        what = [f"{one} the samples of a batch ({how})" for one in what]
        if any(finding.kind not in (*_LAYERS, "loss") for finding in self.findings):
            what.append("micro-batches do not add up to the whole batch")
        return "\n  ".join([f"{'; '.join(what)}:", *map(str, self.findings)])


def audit(
    model: nn.Module, batch: Any = None, *, forward: Callable[[Any, Any], Any] | None = None
) -> Audit:
    """Return what keeps micro-batches of `model` from the update of the whole batch.

    Layers are judged by their type, in their current mode. With a batch, its first 8 samples are
    run with one sample changed, to find layers that mix samples, and in two parts. `forward(model,
    batch)` calls the model; it may return a loss. The model and the random generators are left as
    found.

    >>> import torch
    >>> print(audit(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), torch.randn(4, 2)))
    no layer couples the samples of a batch (by type and by changing one sample)
    """
    findings = tuple(_by_type(model))
    if batch is None:
        return Audit(findings, probed=False)
    layout = readable_layout(batch, None, ())
    if layout is None or layout.size < 2:
        return Audit(findings, probed=True)
    first = next(model.parameters(), None)
    call = _call if forward is None else forward

    def run(few: Any) -> Any:
        return call(model, few if first is None else to_device(few, first.device))

    name = getattr(forward, "__name__", "a function")
    known = {finding.name for finding in findings if finding.kind in _BY_TYPE}
    count = min(layout.size, SAMPLES)
    samples = FirstSamples(model, run, layout, count, graph=False, name=name)
    with samples.testing():
        layers = layers_that_couple(samples, count, known)
    try:
        result = check_adds_up(model, run, layout, outputs=forward is None, name=name)
    except LossError:  # not a loss: outputs
        result = check_adds_up(model, run, layout, outputs=True, name=name)
    found = tuple(one for one in result.findings if one.kind != "untested")
    if layers:  # Then nothing adds up: that is no news.
        found = (*layers, *(f for f in found if f.kind in ("state", "outside")))
    return Audit((*findings, *found), probed=True)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _by_type(model: nn.Module) -> Iterator[AuditFinding]:
    found = [(name, m, _kind(m)) for name, m in batchnorms(model) if uses_batch_statistics(m)]
    found += [(name, m, "running") for name, m in tracked_instance_norms(model) if m.training]
    for name, module in model.named_modules():
        if module.training and _is_ghost(module):
            found.append((name, module, "ghost"))
        if getattr(module, "scale_grad_by_freq", False) and module.weight.requires_grad:
            found.append((name, module, "frequency"))
        if module.training and is_spectral_norm(module):
            found.append((name, module, "spectral"))
    for name, module, kind in found:
        yield AuditFinding(name, type(module).__name__, kind, _ADVICE[kind])


def refused_by_type(model: nn.Module) -> list[AuditFinding]:
    """Return the layers that no policy makes right in micro-batches."""
    return [finding for finding in _by_type(model) if finding.kind in ("ghost", "frequency")]


def _is_ghost(module: nn.Module) -> bool:
    """True by what such layers are called, and by TabNet's name for the size of their parts."""
    named = "ghost" in type(module).__name__.lower() or hasattr(module, "virtual_batch_size")
    return named and any(isinstance(m, _BatchNorm) for m in (module, *module.children()))


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "sync"
    return "batchnorm" if type(module).forward is _BatchNorm.forward else "custom"


def warn_of_spectral_norms(model: nn.Module) -> None:
    """Warn of spectral normalisations, which move once per micro-batch."""
    for finding in _by_type(model):
        if finding.kind == "spectral":
            _log.warning("%s", finding)


def refuse_lazy_parameters(model: nn.Module) -> None:
    """Refuse a model with parameters that have no weights yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedError(
                f"{name!r} is lazy and has no weights yet: run one batch through the model first"
            )


_SEQUENCES = 4
_PACKED = (
    "in one row (pack=): the model does not keep the sequences of a row apart. Transformers' "
    "models do so with use_cache=False in their configuration and without an attention_mask; a "
    "model of your own must attend within the sequences that position_ids tell, and give no units "
    "to labels of -100. Labels that are shifted already must be called shift_labels"
)
_TRIMMED = (
    "without it: what was trimmed counts. Mark targets that do not count with -100, sum the loss "
    "over the others and give their number as units; let the model leave out what the mask hides. "
    "micro_batch= a number of samples trims nothing"
)


@torch.no_grad()
def check_padding(
    run: Callable[[Any], Loss | Terms], layout: Layout, by: Tokens, models: Sequence[nn.Module]
) -> bool:
    """Refuse if sequences have another loss in one row, or without their padding; True if tried.

    A model that reads its positions attends within a sequence alone. One that does not lets
    sequences of a row see each other, and trains on all the same. A mean over the width of the
    batch, a pool over it and targets beyond the mask do not bear that padding is trimmed.

    `run(micro)` returns the loss of a micro-batch. It runs without dropout; `models` are left as
    they were.
    """
    if by.pack:
        ones, together = alone(layout, lengths_of(layout, by)[0], _SEQUENCES)
        given, why = "each by itself", _PACKED
    else:
        pair = without_padding(layout, by, _SEQUENCES)
        if pair is None:
            return False
        ones, together = [pair[0]], pair[1]
        given, why = "with their padding", _TRIMMED
    called = CalledModules(nn.ModuleList(models))
    with ForwardState(*models), evaluation_mode(*models), called:
        apart, packed = _sums(map(run, ones)), _sums([run(together)])
    rounding = 1e-3 if torch.backends.cuda.matmul.allow_tf32 else 2e-5
    allowed = 1e-2 if called.sixteen_bit else rounding
    for name, (total, units) in apart.items():
        in_row, units_in_row = packed[name]
        if units == units_in_row and abs(in_row - total) <= allowed * abs(total) + 1e-12:
            continue
        if not math.isfinite(total):
            return False
        raise UnsupportedError(
            f"tokens(...): sequences {given} have a loss of {total:g} over {units:g} units, and "
            f"{in_row:g} over {units_in_row:g} {why}"
        )
    return True


def _sums(losses: Iterable[Loss | Terms]) -> dict[str, tuple[float, float]]:
    """Return each term's total and units over these losses."""
    found: dict[str, tuple[float, float]] = {}
    for loss in losses:
        for name, term in terms_of(loss).items():
            total, units = found.get(name, (0.0, 0.0))
            found[name] = (total + float(term.total), units + float(term.units))
    return found
