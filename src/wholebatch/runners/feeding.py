"""Who feeds a window: its micro-batches one after the other, or all of them in lock-step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import uses_batch_statistics
from wholebatch.coupled.batchnorm import Policy
from wholebatch.coupled.statistics import Statistics
from wholebatch.errors import UnsupportedError
from wholebatch.execute import Execute, Executor, check_execute
from wholebatch.loss import Loss, Terms, as_loss
from wholebatch.precision import Precision
from wholebatch.runners.lockstep import LockStep
from wholebatch.runners.sequential import run_sequential
from wholebatch.splitting import to_device
from wholebatch.units import SINGLE
from wholebatch.window import Window

__all__ = ["AfterMicro", "Feeding", "LossFunction"]

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
AfterMicro: TypeAlias = Callable[[int, int], None]


class Feeding:
    """Runs the forwards and backwards of a window by whoever its model needs.

    A model whose BatchNorms use batch statistics, with `batchnorm="exact"`, needs lock-step; any
    other takes one micro-batch after the other, each run by the executor.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        window: Window,
        precision: Precision,
        execute: Execute,
        batchnorm: str,
    ) -> None:
        self.model = model
        self._loss = loss
        self._window = window
        self._precision = precision
        self._device = window.target.device
        sync = window.sync
        self._norms = [*batchnorms(model), *tracked_instance_norms(model)]
        self._lock_step = LockStep(
            self._norms,
            model=model,
            hold="auto",
            reduce=sync.sum_tensor if sync.ranks > 1 else None,
        )
        self.policy: Policy | None = None
        if batchnorm != "exact":
            self.policy = choose_batchnorm(batchnorm, model)
        self.executor = Executor(
            check_execute(execute, self._device),
            model=model,
            loss=loss,
            window=window,
            precision=precision,
            device=self._device,
            eager=self._eager,
            single=SINGLE,
            keeps_moments=isinstance(self.policy, Statistics),
        )

    # ------------------------------------------------------------ the windows

    def begin_window(self) -> None:
        """The first micro-batch of an attempt at a window comes next."""
        if self.policy is not None:
            self.policy.begin_window()

    def end_window(self) -> None:
        """The window's update is made."""
        if self.policy is not None:
            self.policy.end_window()

    def discard_window(self) -> None:
        """The window is over, whatever became of it."""
        if self.policy is not None:
            self.policy.discard_window()

    def run(
        self,
        micros: Sequence[Any],
        *,
        first: int,
        reduces: bool,
        before_micro: Callable[[int], None],
        after_micro: AfterMicro,
    ) -> None:
        """The forwards and backwards of `micros[first:]`; the last backward may reduce."""
        if not self.in_lock_step(micros):
            run_sequential(
                self._window,
                micros,
                self.micro_step,
                first=first,
                places=self.agreed_places(len(micros)),
                reduces=reduces,
                before_micro=before_micro,
                after_micro=after_micro,
            )
        elif first < len(micros):
            self._run_in_lock_step(micros)
            after_micro(len(micros), len(micros))

    def agreed_places(self, own: int) -> int:
        """How many micro-batches every rank runs, where they must agree."""
        sync = self._window.sync
        if not sync.counts_must_agree:
            return own
        return int(sync.largest(torch.tensor(float(own), device=self._device)))

    # -------------------------------------------------------------- lock-step

    def in_lock_step(self, micros: Sequence[Any]) -> bool:
        """Whether these micro-batches have to run together."""
        many = len(micros) > 1 or self._window.sync.ranks > 1
        return many and self.needs_lock_step()

    def needs_lock_step(self) -> bool:
        """Whether a BatchNorm would use batch statistics, or an InstanceNorm move its own, now."""
        return self.policy is None and any(uses_batch_statistics(m) for _, m in self._norms)

    def _run_in_lock_step(self, micros: Sequence[Any]) -> None:
        """All micro-batches together, meeting at every BatchNorm; done all at once."""

        def backward(loss: Loss | Terms) -> None:
            self._window.add_loss(loss)
            self._window.micro_batch_done()

        if self._window.sync.counts_must_agree:
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: its forwards run collectives of their own, '
                "which cannot wait for each other in lock-step; use DDP, or another batchnorm="
            )
        self._lock_step.run(micros, forward=self.forward, backward=backward)

    # ---------------------------------------------------------- a micro-batch

    def forward(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """The loss of a micro-batch, in the window's precision and on the model's device."""
        micro = to_device(micro, self._device)
        with self._precision.forward():
            loss = as_loss((loss_function or self._loss)(self.model, micro))
        if self.policy is not None:
            self.policy.micro()
        return loss

    def micro_step(self, micro: Any) -> None:
        """Forward and backward of a micro-batch, entered in the window."""
        self.executor.micro_step(micro)

    def _eager(self, micro: Any, loss_function: LossFunction) -> Loss | Terms:
        loss = self.forward(micro, loss_function)
        self._window.add_loss(loss)
        return loss
