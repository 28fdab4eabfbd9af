"""The runner of a `wb.Coupled` loss, and the choice of a runner.

A first pass makes the representations of the whole batch, a second one their gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.two_pass import TwoPasses, WholeRepresentations, gather_rows
from wholebatch.errors import LossError, UnsupportedError, WindowError
from wholebatch.loss_functions import LossFunction
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss, Term, Terms, as_loss, terms_of
from wholebatch.runner import Runner, WindowRun
from wholebatch.window.close import read_scalars
from wholebatch.window.ledger import Ledger

_log = logging.getLogger("wholebatch")


class TwoPassRunner(Runner):
    """Runs a loss of the whole batch: representations first, then their gradients.

    Every rank computes the whole loss from all representations and scales it by 1 / ranks. So the
    sum over the ranks is one loss, also for parameters that only the loss uses. A batch that is
    not split is encoded once: its graph is kept between the passes.
    """

    is_coupled = True

    def __init__(self, model: Any, loss: Coupled, **options: Any) -> None:
        super().__init__(model, loss, **options)
        sync = self._ledger.sync
        if not sync.runs_alone:
            raise UnsupportedError(
                f"wb.Coupled on a model of {type(sync).__name__}: its forward runs collectives, "
                "and the two passes are tested only with plain modules, DistributedDataParallel "
                '(without SyncBatchNorm) and FSDP2 with close=wb.Close(sync="gathered"); use one '
                "of those"
            )
        self._coupled = loss
        self._keep = loss.keep

    def needs_every_rank(self) -> str | None:
        return "a loss of the whole batch (wb.Coupled) needs the representations of every rank"

    def frees_memory(self) -> bool:
        if not self._keep or self.is_undivided():
            return False
        self._keep = 0
        _log.warning("out of memory: no graphs of the first pass are kept any more")
        return True

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run both passes over all micro-batches; one is done after its second pass."""
        self._prepare(micros)
        with self._norms_over_ranks():
            self._run_passes(micros, how)

    def _run_passes(self, micros: Sequence[Any], how: WindowRun) -> None:
        ledger = self._ledger

        def encode(micro: Any) -> Any:
            micro = self._on_device(micro)
            with self._precision.forward():
                return self._coupled.encode(self.model, micro)

        def inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
            last = how.reduces and len(ledger.micro_batches) == len(micros) - 1
            if outputs:
                ledger.observer.backward_begins()
                ledger.backward(outputs, gradients, last=last)
                ledger.observer.gradients_are_added(ledger.inputs)
            ledger.record({})  # its loss is that of the window
            ledger.end_micro_batch()
            how.after_micro(len(ledger.micro_batches), len(micros))

        passes = TwoPasses(
            micros,
            encode,
            modules=ledger.target.models,
            keep=max(1, self._keep) if len(micros) == 1 else self._keep,
        )
        whole = passes.first()
        torch.clear_autocast_cache()  # Casts made without a graph pass no gradient back.
        self._add_loss(whole, may_retry=bool(passes.kept))
        passes.second(whole, inject, self._coupled.tolerance)

    def _add_loss(self, whole: WholeRepresentations, *, may_retry: bool) -> None:
        """Compute the loss of the whole batch and run its backward into the representations."""
        sync = self._ledger.sync
        gather = partial(gather_rows, group=sync.group)
        try:
            with self._precision.forward():
                loss = as_loss(self._coupled.of_all(self.model, whole.for_loss(gather)))
            self._backward(loss, [leaf for leaf in whole.tensors if leaf.requires_grad])
        except torch.OutOfMemoryError as error:
            if may_retry:
                raise
            # Smaller micro-batches would not help: do not raise an out-of-memory error.
            raise WindowError(
                f"the loss of the whole batch ran out of memory ({str(error).splitlines()[0]}): it "
                f"holds the representations of all {len(whole.tensors[0])} samples and everything "
                "computed from them. Compute fewer rows at a time (the losses of wb.losses have "
                "rows=), or make the representations or the batch smaller"
            ) from None

    def _backward(self, loss: Loss | Terms, leaves: list[Tensor]) -> None:
        """Record the loss, and run its backward into the leaves and its own parameters."""
        terms = terms_of(loss)
        units = self._agreed_units(terms)
        ledger, sync = self._ledger, self._ledger.sync
        ledger.begin(known=units)
        share = 1.0 / sync.ranks
        seeds = [
            ledger.seed_of(name, term.total, term.weight) * share for name, term in terms.items()
        ]
        own = 1.0 if sync.rank == 0 else 0.0  # All losses are equal: count only one.
        ledger.record(
            {
                name: Term(term.total.detach() * own, units[name] * own, term.weight)
                for name, term in terms.items()
            },
            of_the_window=True,
        )
        ledger.backward([term.total for term in terms.values()], seeds, also=leaves)
        ledger.observer.gradients_are_added(ledger.inputs)

    def _agreed_units(self, terms: Mapping[str, Term]) -> dict[str, float]:
        """Return the units of each term; raise LossError if the ranks' losses differ."""
        read = read_scalars(
            [
                *(term.units for term in terms.values()),
                *(term.total.detach() for term in terms.values()),
            ]
        )
        sync = self._ledger.sync
        for own, summed in zip(read, sync.group.sum(read), strict=True):
            if math.isfinite(own) and not math.isclose(
                summed, own * sync.ranks, rel_tol=1e-4, abs_tol=1e-6
            ):
                raise LossError(
                    f"the loss of the whole batch differs between the ranks (here {own:g}, on "
                    f"average {summed / sync.ranks:g}): loss(all) gets the representations of "
                    "all ranks and must return the same value on every rank"
                )
        return dict(zip(terms, read, strict=False))


def choose_runner(
    model: Any,
    loss: LossFunction | Coupled,
    *,
    root: nn.Module,
    ledger: Ledger,
    batchnorm: str,
    **options: Any,
) -> Runner:
    """Return the runner that this model and loss need; refuse options that do not go together."""
    policy = None if batchnorm == "exact" else choose_batchnorm(batchnorm, root)
    options.update(root=root, ledger=ledger, policy=policy)
    if isinstance(loss, Coupled):
        return TwoPassRunner(model, loss, **options)
    return Runner(model, loss, **options)
