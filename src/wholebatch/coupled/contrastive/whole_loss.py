"""A loss of the whole batch in a window: one entry in the ledger, and a backward in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.close import power_of_two_near, read_scalars
from wholebatch.core.foreign_writes import Untouched
from wholebatch.core.loss import Loss, Term, Terms
from wholebatch.core.units import SINGLE
from wholebatch.core.window import Window
from wholebatch.coupled.contrastive.kept_graphs import Keeping
from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.coupled.contrastive.two_pass import Each, run_two_pass
from wholebatch.distributed.process_group import Gathered
from wholebatch.errors import LossError, UnsupportedError

__all__ = ["WholeLoss"]

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class WholeLoss:
    """A runner that feeds windows by two passes, with the loss of the global batch.

    Every rank computes the whole loss from all representations and scales it by 1 / ranks. So the
    sum over the ranks is one loss, also for parameters that only the loss uses.
    """

    def __init__(
        self, coupled: Coupled, model: Any, *, window: Window, untouched: Untouched
    ) -> None:
        sync = window.sync
        if sync.grows_own_graph or sync.counts_must_agree:
            raise UnsupportedError(
                f"wb.Coupled on a model of {type(sync).__name__}: its forwards run collectives "
                "of their own, and the two passes are tested with plain modules and "
                "DistributedDataParallel (without SyncBatchNorm) only; use those"
            )
        self._coupled = coupled
        self.keeping = Keeping(coupled.keep, window.target.models)
        self._model = model
        self._window = window
        self._untouched = untouched
        self._gather = Gathered(sync) if sync.ranks > 1 else None
        self._finite: list[Tensor] = []

    def run(
        self,
        micros: Sequence[Any],
        *,
        reduces: bool,
        moved: Callable[[Any], Any],
        sampling: Callable[[Any], AbstractContextManager[Any]],
        computing: Callable[[], AbstractContextManager[Any]],
        between: Callable[[], None],
        each: Each | None,
        keeps_graphs: bool,
        before_micro: Callable[[int], None],
        after_micro: Callable[[int, int], None],
    ) -> None:
        """Run both passes; a micro-batch is done after its second pass."""
        window = self._window

        def inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
            last = window.micro_batches == len(micros) - 1
            window.closing = reduces and each is None and last
            if outputs:
                with self._untouched.backward():
                    window.backward(outputs, gradients)
            window.micro_batch_done()
            if each is None:
                after_micro(window.micro_batches, len(micros))

        try:
            self._finite = run_two_pass(
                self._coupled,
                self._model,
                micros,
                modules=window.target.models,
                whole=self._add,
                inject=inject,
                moved=moved,
                sampling=sampling,
                computing=computing,
                between=between,
                before_micro=before_micro,
                each=each,
                gather=self._gather,
                keep=self.keeping.number() if keeps_graphs and each is None else 0,
                weighing=self.keeping.weighing,
            )
        except torch.OutOfMemoryError:
            self.keeping.ran_out()
            raise
        if each is not None:
            after_micro(len(micros), len(micros))

    def _add(self, loss: Loss | Terms, leaves: list[Tensor]) -> None:
        """Run the backward of the whole loss, into the representations and its own parameters."""
        window = self._window
        terms = _terms(loss)
        units = self._agreed(terms)
        window.begin(known=units)
        if terms.keys() == {SINGLE} and terms[SINGLE].total.dtype in _SIXTEEN_BIT:
            # 1 / units would be rounded to 16 bit. A power of two is exact, and the close rescales.
            window.seed, window.known = power_of_two_near(1.0 / (units[SINGLE] or 1.0)), None
        share = 1.0 / window.sync.ranks
        seeds = [
            window.seed_of(name, term.total, term.weight) * share for name, term in terms.items()
        ]
        own = 1.0 if window.sync.rank == 0 else 0.0  # All losses are equal: count only one.
        window.record(
            {name: term.total.detach() * own for name, term in terms.items()},
            {name: units[name] * own for name in terms},
            {name: term.weight for name, term in terms.items()},
        )
        window.owners.clear()  # The loss belongs to no single micro-batch.
        with self._untouched.backward():
            window.backward([term.total for term in terms.values()], seeds, also=leaves)

    def _agreed(self, terms: Mapping[str, Term]) -> dict[str, float]:
        """Return the units of each term; raise LossError if the ranks' losses differ."""
        read = read_scalars(
            [
                *(term.units for term in terms.values()),
                *(term.total.detach() for term in terms.values()),
            ]
        )
        sync = self._window.sync
        if sync.ranks > 1:
            for own, summed in zip(read, sync.sum(read), strict=True):
                if math.isfinite(own) and not math.isclose(
                    summed, own * sync.ranks, rel_tol=1e-4, abs_tol=1e-6
                ):
                    raise LossError(
                        "the loss of the whole batch differs between the ranks (here "
                        f"{own:g}, on average {summed / sync.ranks:g}): loss(all) is given the "
                        "representations of all ranks and must be the same function of them on each"
                    )
        return dict(zip(terms, read, strict=False))

    def find_nonfinite(self) -> tuple[int | None, str]:
        """Return the first micro-batch that is not finite, or None, and a sentence about it."""
        finite = [bool(flag) for flag in self._finite]
        if all(finite):
            return None, "The representations are finite: it is the loss, or its way back"
        index = finite.index(False)
        return index, (
            f"Micro-batch {index + 1} of {len(finite)} is the first whose representations are not "
            "finite"
        )


def _terms(loss: Loss | Terms) -> dict[str, Term]:
    if isinstance(loss, Loss):
        return {SINGLE: Term(loss.total, loss.units)}
    return dict(loss.by_name)
