"""Find the layers that let one sample's output depend on the other samples of its batch.

Such a layer makes plain accumulation silently wrong: BatchNorm by a third to two thirds of
the gradient. `audit` finds them by their type and, when it is given a batch, by changing one sample
and looking at whose outputs move: that finds what no list of types can know. `SplitGuard` does both
before the first window that is split, so that no such model is trained unnoticed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.batch import Tokens, to_device
from wholebatch.batch.micro_batches import lengths_of, without_padding
from wholebatch.batch.packing import alone
from wholebatch.batch.samples import BatchSize, Layout, Static, readable_layout
from wholebatch.compile.captured_state import Fingerprint, LookAgain
from wholebatch.coupled.adds_up import SAMPLES, LookResult, check_adds_up
from wholebatch.coupled.causes import AuditFinding, layers_that_couple
from wholebatch.coupled.last_reduction import StepDivision, find_step_division, last_reductions
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    evaluation_mode,
    is_spectral_norm,
    known_norms,
    refuse_new_norms,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.coupled.sample_runs import CalledModules, FirstSamples, local_collectives
from wholebatch.distributed import Sync
from wholebatch.errors import LossError, UnsupportedError, WholebatchError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.forward_state import ForwardState

_log = logging.getLogger("wholebatch")

_TRIES = 8
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
    model: nn.Module,
    batch: Any = None,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    batch_size: BatchSize = None,
    static: Static = (),
) -> Audit:
    """Return what keeps micro-batches of `model` from the update of the whole batch.

    Layers are judged in their current mode: a BatchNorm in evaluation mode is not reported. The
    model, its gradients and buffers, and the random generators are left as found.

    >>> import torch
    >>> print(audit(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), torch.randn(4, 2)))
    no layer couples the samples of a batch (by type and by changing one sample)

    Args:
        model: The model to look at.
        batch: Run the model on the first samples of this batch (8 at most): with one sample
            changed, to find layers that mix samples, and in halves, to test that the outputs and
            gradients add up. Without a batch, layers are judged by their type only.
        forward: A function `forward(model, batch)` that calls the model. With a loss function, a
            loss that compares samples or returns a mean as a sum is found too. Default: call the
            model with the batch, or with its items.
        batch_size: The number of samples, or a function that returns it, as for `split`.
        static: Leaves that are passed on whole, as for `split`.
    """
    findings = tuple(_by_type(model))
    if batch is None:
        return Audit(findings, probed=False)
    layout = readable_layout(batch, batch_size, static)
    if layout is None or layout.size < 2:
        return Audit(findings, probed=True)
    first = next(model.parameters(), None)
    call = _call if forward is None else forward

    def run(few: Any) -> Any:
        return call(model, few if first is None else to_device(few, first.device))

    name = getattr(forward, "__name__", "a function")
    known = {finding.name for finding in findings if finding.kind in _BY_TYPE}
    samples = FirstSamples(model, run, layout, 2, graph=False, name=name)
    with samples.looking():
        layers = layers_that_couple(samples, min(layout.size, SAMPLES), known)
    given: dict[str, Any] = {"name": name, "micro_batch": min(layout.size, SAMPLES)}
    try:
        look = check_adds_up(model, run, layout, outputs=forward is None, **given)
    except LossError:  # not a loss: outputs
        look = check_adds_up(model, run, layout, outputs=True, **given)
    found = look.findings
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


class LossLook:
    """Looks whether a loss adds up (`check_adds_up`), all ranks together.

    A batch whose first samples have no units tells nothing; in one process the next one is looked
    at then. There it also looks again after the model, or what `loss` reads, has changed.
    `off` is how a user of this door trains all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Sync,
        *,
        looks: bool,
        off: str = "audit=False",
        loss: Callable[..., Any] = _call,
    ) -> None:
        self._model, self._sync, self._off, self._loss = model, sync, off, loss
        self._tries = _TRIES if looks else 0
        self._again = LookAgain()

    @property
    def pending(self) -> bool:
        return self._tries > 0

    def begin_window(self, changed: bool | None = None) -> None:
        """Look again if anything that the code reads is not as it was (see `LookAgain`)."""
        if self._again.is_due(changed):
            self._tries = 1

    def look_at(
        self,
        run: Callable[[Any], Any],
        samples: Callable[[], tuple[Layout | None, int | None]],
        steps: Collection[int] = (),
        **options: Any,
    ) -> bool:
        """Refuse what does not add up, and layers that cannot by their type; True if it does.

        `samples()` returns the batch and how many of it a micro-batch has. `steps` are the numbers
        that a loop may call its accumulation steps: a mean that is divided by one is refused. The
        other options are those of `check_adds_up`.
        """
        division = _ReadDivision(run, steps)
        result, layout, known = LookResult(), None, refused_by_type(self._model)
        try:
            layout, size = samples()
            with local_collectives():
                checked = division.run if steps else run
                result = check_adds_up(self._model, checked, layout, micro_batch=size, **options)
        except torch.OutOfMemoryError:
            _log.warning("no memory to test if micro-batches add up to the whole batch")
            result = LookResult(checked=False)
        except Exception as error:  # most often the loss's own, and the step will raise it
            _log.warning("not tested if micro-batches add up to the whole batch: %r", error)
            known += self._failed(error, run, layout)
            result = LookResult(checked=False)
        known += division.findings()
        again = self._sync.ranks == 1 and not result.conclusive
        self._tries = self._tries - 1 if again else 0
        self._refuse((*known, *result.findings))
        if not self._tries and self._sync.ranks == 1:
            self._again.seen = [Fingerprint(self._model, self._loss)]
        return result == LookResult()

    def _failed(
        self, error: Exception, run: Callable[[Any], Any], layout: Layout | None
    ) -> Iterable[AuditFinding]:
        """Return what to say of a look that has failed; nothing if the step will fail too."""
        return ()

    def _refuse(self, found: tuple[AuditFinding, ...]) -> None:
        on_another = bool(self._sync.sum([float(len(found))])[0])
        LookResult(found).refuse(self._off, on_another_rank=on_another)


class _ReadDivision:
    """Runs a loss function, and reads if its first loss is divided by the number of steps."""

    def __init__(self, run: Callable[[Any], Any], steps: Collection[int]) -> None:
        self._run, self._steps, self._is_read = run, steps, False
        self._found: StepDivision | None = None

    def run(self, batch: Any) -> Any:
        result = self._run(batch)
        if not self._is_read and isinstance(result, Loss | Terms):
            self._is_read = True
            for term in terms_of(result).values():
                read = find_step_division(last_reductions(term.total), term.units, self._steps)
                self._found = self._found or read
        return result

    def findings(self) -> list[AuditFinding]:
        """Return a division that is sure; warn of one that is not."""
        if self._found is None:
            return []
        if not self._found.is_sure:
            self._found.report()
            return []
        name = "(the loss function)"
        return [AuditFinding(name, "division by the steps", "divided", self._found.message)]


class SplitGuard(LossLook):
    """Audits a model by type when it is made, and by a look at the first batch that is split.

    The look is left out where forwards run collectives of their own.
    """

    def __init__(
        self, model: nn.Module, sync: Sync, *, looks: bool, loss: Callable[..., Any]
    ) -> None:
        super().__init__(model, sync, looks=looks, loss=loss)
        self._micros: Sequence[Any] = ()
        self._norms = {module for _, module in batchnorms(model)}
        known_norms.update(self._norms)
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UnsupportedError(
                    f"{name!r} is lazy and has no weights yet: run one batch through the model "
                    "first"
                )
        warn_of_spectral_norms(model)

    def look(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        micros: Sequence[Any],
        *,
        batch_size: BatchSize,
        static: Static,
        **options: Any,
    ) -> bool:
        """Refuse what does not add up; `micros` is what the batch is split into."""

        def samples() -> tuple[Layout | None, int]:
            return _samples(readable_layout(batch, batch_size, static), micros, static)

        # A list of samples has no leaf that could be read wrongly: its loss may take one at a time.
        self._micros = () if isinstance(batch, list) else micros
        refuse_new_norms([self._model], self._norms)
        adds_up = self.look_at(run, samples, **options)
        self._micros = ()
        return adds_up

    @torch.no_grad()
    def _failed(
        self, error: Exception, run: Callable[[Any], Any], layout: Layout | None
    ) -> Iterable[AuditFinding]:
        if isinstance(error, WholebatchError) or layout is None:
            return ()
        if not self._micros or not self._runs(run, self._micros[0]):
            return ()  # The step will say why.
        counts = [count for count in (1, 2, 4, 8) if count <= layout.size]
        if all(self._runs(run, layout.take(list(range(count)))) for count in counts):
            return ()  # The number of samples is not the reason.
        text = (
            f"it runs on a micro-batch, but not on another number of samples ({error!r}), so that "
            "nothing tells whether micro-batches add up. If the batch has a leaf that is not a "
            "value per sample, name it: micro_batch=wb.samples(8, static=...)"
        )
        return (AuditFinding("(the loss function)", type(error).__name__, "loss", text),)

    def _runs(self, run: Callable[[Any], Any], batch: Any) -> bool:
        try:
            with ForwardState(self._model), local_collectives():
                run(batch)
        except Exception:
            return False
        return True

    def join(self) -> None:
        """Take part in the other ranks' look, without a sample of one's own."""
        if self.pending:
            self._tries = 0
            self._refuse(())


def _samples(
    whole: Layout | None, micros: Sequence[Any], static: Static
) -> tuple[Layout | None, int]:
    """Return the samples for a first look, and how many a micro-batch has.

    Those of the batch, unless micro-batches differ in size: made by a budget of tokens, the first
    one holds samples that belong together.
    """
    made = [readable_layout(micro, None, static) for micro in micros]
    sizes = [1 if one is None else one.size for one in made]
    if whole is not None and sum(sizes) != whole.size:
        # Few samples may read otherwise than many: three images as three parts of a batch.
        return whole, -(-whole.size // len(micros))
    if len(set(sizes[:-1])) > 1 and sizes[0] > 1:
        return made[0], sizes[0]
    return whole, sizes[0]


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
    "trim={'name': ()} keeps a leaf whole, and micro_batch= a number of samples trims nothing"
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
        ones, together = alone(layout, by, lengths_of(layout, by)[0], _SEQUENCES)
        given, why = "each by itself", _PACKED
    else:
        pair = without_padding(layout, by, _SEQUENCES)
        if pair is None:
            return False
        ones, together = [pair[0]], pair[1]
        given, why = "with their padding", _TRIMMED
    called = CalledModules(nn.ModuleList(models))
    with ForwardState(*models), evaluation_mode(*models), called, local_collectives():
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
