"""The loss adds up: total, units and gradient of some samples are those of their halves together.

What holds for a few samples and their halves is what makes accumulation exact. So it is looked at
once, on the user's own data with the user's own loss function, before anything is trained:

```python
look = AddsUp(model).look(lambda few: loss(model, few), micro)
look.refuse()          # raises LossError or UnsupportedError with the causes and the ways out
```
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from wholebatch.core.splitting.samples import BatchSize, Static, readable_layout
from wholebatch.coupled import causes
from wholebatch.coupled.finding import Finding
from wholebatch.coupled.local_collectives import LocalCollectiveError
from wholebatch.coupled.moving_state import Moving
from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics
from wholebatch.coupled.rounding_tolerance import Tolerance
from wholebatch.coupled.sample_runs import Few, GoesBack, Run, Uncheckable, evaluating
from wholebatch.errors import LossError, UnsupportedError

__all__ = ["AddsUp", "Look"]

_log = logging.getLogger("wholebatch")

_SAMPLES = 8
_ENOUGH = 4
_DRAWS = 8
_COMPARES = (
    "%s seems to compare samples with each other: with the same random numbers, the losses of two "
    "groups of %d samples are together %.6g, and %.6g when they exchange halves. Each micro-batch "
    "would only be compared with itself: if so, give wb.Coupled(encode, loss), which sees the "
    "whole batch"
)
_MISTAKES = ("mean", "sum", "added", "units")


@dataclass(frozen=True, slots=True)
class Look:
    """What a look has found; `told` is False where there were no two samples, or no units."""

    findings: tuple[Finding, ...] = ()
    told: bool = True

    def refuse(self, off: str = "WholeBatch(audit=False)", elsewhere: bool = False) -> None:
        """Raise if anything was found; `elsewhere` says that another rank has found something.

        `off` is how a user of this door trains all the same.
        """
        if not self.findings and not elsewhere:
            return
        listed = "\n  ".join(map(str, self.findings)) or "(found on another rank)"
        message = (
            "micro-batches cannot give the update of the whole batch here:\n  "
            f"{listed}\n{off} trains it all the same: what was named is then computed of each "
            "micro-batch by itself"
        )
        mistaken = self.findings and all(f.kind in _MISTAKES for f in self.findings)
        raise LossError(message) if mistaken else UnsupportedError(message)


class AddsUp:
    """Looks whether micro-batches can give the update of the whole batch, for any door.

    `model` holds all modules that are trained. It is left as found: parameters, gradients, buffers,
    attributes and random generators. A DDP model must be in `no_sync`; a model whose forwards run
    collectives (FSDP, DeepSpeed) cannot be looked at, unless all ranks look at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def look(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        *,
        micro_batch: int | None = None,
        batch_size: BatchSize = None,
        static: Static = (),
        outputs: bool = False,
        name: str = "the loss function",
    ) -> Look:
        """Hold the first samples of `batch` against their halves, forward and backward.

        `run(few)` runs forward and loss function as training does, precision included, on a batch
        of the same structure; it returns a `Loss`, `Terms` or a tensor of per-unit losses (with
        `outputs=True` a structure of tensors that have a row for each sample). 2 to 8 samples are
        run with their gradient, so many that all runs cost no more than a micro-batch of
        `micro_batch` samples (default: `batch` is one). Where these are only 2, up to 8 are run
        without their gradient too. `batch_size` and `static` say how the batch is to be read, as in
        `WholeBatch`. `name` is how findings call the function.
        """
        made = self._few(run, batch, batch_size, static, outputs=outputs)
        if made is None:
            return Look(told=False)
        few, size = made
        micro_batch = micro_batch or size
        more = min(size, _SAMPLES, 3 * micro_batch)
        try:
            return _Looking(few, _with_gradient(size, micro_batch), more, name).result()
        except Uncheckable as reason:
            _log.debug("the loss was not looked at: %s", reason)
            return Look()
        finally:
            _release()

    def layers(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        *,
        batch_size: BatchSize = None,
        static: Static = (),
        known: Collection[str] = (),
        name: str = "the loss function",
    ) -> tuple[Finding, ...]:
        """Return the layers whose output for one sample moves with another sample.

        `known` names those that need not be found.
        """
        made = self._few(run, batch, batch_size, static)
        if made is None:
            return ()
        few, size = made[0](2, False), made[1]
        with few.looking():
            return causes.by_changing_a_sample(few, min(size, _SAMPLES), name, known)

    def _few(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        batch_size: BatchSize,
        static: Static,
        *,
        outputs: bool = False,
    ) -> tuple[Callable[[int, bool], Few], int] | None:
        """Return what makes runs of the first samples, and how many there are; None below 2."""
        layout = readable_layout(batch, batch_size, static)
        if layout is None or layout.size < 2:
            return None
        norms = [(n, norm) for n, norm in batchnorms(self._model) if uses_batch_statistics(norm)]

        def few(count: int, graph: bool) -> Few:
            given = (self._model, run, layout, count)
            return Few(*given, norms=norms, outputs=outputs, graph=graph)

        return few, layout.size


def _with_gradient(size: int, micro_batch: int) -> int:
    """Return of how many samples the gradient is looked at too.

    In forwards of one sample, n samples with their gradient cost 6.5 n (forward and backward of 2 n
    and a forward of n/2), and a micro-batch of m samples 3 m.
    """
    return _power_of_two(min(size, max(2, min(_SAMPLES, 6 * micro_batch // 13))))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number: pairs and groups of samples stay together."""
    return 1 << number.bit_length() - 1


class _Looking:
    """One look: the samples beside their halves, and where these differ, why."""

    def __init__(self, few: Callable[[int, bool], Few], count: int, more: int, name: str) -> None:
        self._few = few
        self._count = count
        self._more = more
        self._name = name

    def result(self) -> Look:
        made = self._of_gradients()
        more = _power_of_two(self._more)
        if made.findings or not made.told or self._count >= min(more, _ENOUGH):
            return made
        for graph in (False, True):
            try:  # Two samples may have nothing to do with each other; of eight some have.
                return self._looked(self._few(more, graph), again=True)
            except GoesBack:
                continue  # the loss runs a backward of its own, and needs a graph for it
            except (torch.OutOfMemoryError, Uncheckable):
                break
        return made

    def _of_gradients(self) -> Look:
        try:
            return self._looked(self._few(self._count, True))
        except (torch.OutOfMemoryError, LocalCollectiveError) as reason:
            _log.debug("gradients are not looked at, only forwards: %r", reason)
        _release(thoroughly=True)
        return self._looked(self._few(self._count, False))

    def _looked(self, few: Few, *, again: bool = False) -> Look:
        """`again` says that fewer samples were looked at before, and nothing was found."""
        with few.looking():
            found = self._compared(few, looked=again)
        return found if isinstance(found, Look) else self._named(few, *found)

    def _compared(self, few: Few, *, looked: bool) -> Look | tuple[Sequence[Run], Tolerance]:
        """Return what was found, or the runs that do not add up."""
        half = few.count // 2
        whole = few.whole()
        if few.called.outside is not None:
            return Look((causes.outside_norm(few.called.outside, self._name),))
        if not whole.sums or not whole.units or not whole.is_finite:
            return Look(told=False)
        tolerance = Tolerance.of(few, whole)
        watched = Moving(few, whole)
        try:
            first = few.part(0, half, backward=True, scale=0.25)
            left = watched.as_left_by(first)
            second = few.part(half, few.count, prepare=left, backward=True, scale=0.25)
            # Without state that moves, the same samples would give the same once more.
            again = second if looked and not watched.any else few.part(half, few.count)
        except (torch.OutOfMemoryError, Uncheckable):
            raise
        except Exception as problem:
            _log.debug("a half of %s samples could not be run: %r", few.count, problem)
            return (whole,), tolerance
        if not (first.is_finite and again.is_finite):
            return (whole,), tolerance
        found = watched.acting(first, second, again, tolerance)
        if found:
            return Look(found)
        runs = (
            whole,
            first,
            again if again.digests is not None else replace(again, digests=second.digests),
        )
        if tolerance.adds_up(whole, runs[1:]) and not tolerance.gradient_gap(whole, runs[1:]):
            return Look(watched.kept(first, second, again, tolerance))
        if not few.draws.held or not _drew_alike(runs):
            return self._without_draws(few)
        return runs, tolerance

    def _without_draws(self, few: Few) -> Look | tuple[Sequence[Run], Tolerance]:
        """Look again in evaluation mode, where dropout draws nothing."""
        _log.debug("random numbers could not be held: a look in evaluation mode")
        with evaluating(few.model):
            try:
                half, backward = few.count // 2, few.graph
                few.graph = False
                whole = few.whole()
                runs = (whole, few.part(0, half), few.part(half, few.count))
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # not a loss, or none in evaluation mode
                raise Uncheckable(repr(problem)) from None
            finally:
                few.graph = backward
        tolerance = Tolerance.of(few, whole)
        if tolerance.adds_up(whole, runs[1:]):
            return Look()
        if not few.draws.held or not _drew_alike(runs):
            self._warn_of_random_comparisons(few, tolerance)
            raise Uncheckable("random numbers cannot be held")
        return runs, tolerance

    def _warn_of_random_comparisons(self, few: Few, tolerance: Tolerance) -> None:
        """Warn of a loss that compares samples, where its draws cannot be held.

        Then only runs of one shape draw alike. With two pairs of parts that are exchanged,

            L(a, b) + L(c, d) = L(c, b) + L(a, d)

        if and only if each sample counts by itself.
        """
        part = min(self._more, few.layout.size) // 4
        if not part:
            return
        a, b, c, d = (list(range(i * part, (i + 1) * part)) for i in range(4))
        for skip in range(_DRAWS):  # one draw may happen to keep the parts apart
            try:
                runs = [few.of(x + y, skip) for x, y in ((a, b), (c, d), (c, b), (a, d))]
            except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
                return
            one, other = (runs[0].total + runs[1].total, runs[2].total + runs[3].total)
            size = max(sum(abs(run.total) for run in pair) for pair in (runs[:2], runs[2:]))
            if not tolerance.near(one, other, size):
                _log.warning(_COMPARES, self._name, 2 * part, one, other)
                return

    def _named(self, few: Few, runs: Sequence[Run], tolerance: Tolerance) -> Look:
        """Return the cause; `runs` are those of the whole and of its halves, if these have any."""
        whole, *parts = runs
        if parts and tolerance.adds_up(whole, parts):
            with few.looking():
                return Look((causes.of_gradient(few, runs, tolerance, self._name),))
        couples = (causes.couples(runs, self._name),) if parts else ()
        try:
            return Look(self._of_more(tolerance) or couples)
        except torch.OutOfMemoryError:
            return Look(couples)
        except Uncheckable:  # a loss that runs a backward of its own
            with few.looking():
                return Look((causes.of_loss(few, runs, tolerance, self._name),) if parts else ())

    def _of_more(self, tolerance: Tolerance) -> tuple[Finding, ...]:
        """Return what more samples, run forwards only, tell of the cause."""
        few = self._few(_power_of_two(self._more), False)
        half = few.count // 2
        with few.looking():
            try:
                runs = (few.whole(), few.part(0, half), few.part(half, few.count))
            except (torch.OutOfMemoryError, Uncheckable):
                raise
            except Exception:  # a layer that needs more samples than a half has
                return causes.by_changing_a_sample(few, self._more, self._name)
            if not few.draws.held or not _drew_alike(runs):
                return ()
            found = causes.of_loss(few, runs, tolerance, self._name)
            if found.kind != "loss":
                return (found,)
            layers = causes.by_changing_a_sample(few, self._more, self._name)
            return layers or (() if tolerance.adds_up(runs[0], runs[1:]) else (found,))


def _drew_alike(runs: Sequence[Run]) -> bool:
    """True if Python's and NumPy's generators were drawn from equally often in every run."""
    return all(run.after.host_draws_same(runs[0].after) for run in runs[1:])


def _release(*, thoroughly: bool = False) -> None:
    if thoroughly:
        gc.collect()
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():  # what comes now stays: not in the gaps of what was
        torch.cuda.empty_cache()
