"""Windows that fit: split the batch, choose the size, begin again if memory runs out.

A forward or backward that fails half way has added some gradients, changed BatchNorm's running
statistics and advanced the random generators. Continuing from there would be wrong. So all of this
is restored, the batch is split into smaller micro-batches, and the window starts again. The result
is bit for bit that of a window with this split from the start.

Only the typed `torch.OutOfMemoryError` counts, never the text of a message. The optimizer step is
not retried: once parameters change, the old state is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch import Batches, Tokens
from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, RankError, UnsupportedError
from wholebatch.memory.budget import Budget, limit_allocator
from wholebatch.memory.meter import free_caches
from wholebatch.memory.micro_batch_choice import MicroBatchChoice
from wholebatch.memory.undivided_batch import UndividedBatch
from wholebatch.memory.window_split import WindowSplit
from wholebatch.window.forward_state import ForwardState

_log = logging.getLogger("wholebatch")
_STEPS_BACK = 7 / 8
"""The share of a size that is tried next if a step of that size was measured to fit."""
_MOST = 64
"""Attempts at one window: each has smaller micro-batches, or a setting that needs less memory."""


@dataclass(frozen=True)
class Recovered:
    """One recovery: the samples of the largest micro-batch, before and after."""

    samples: int
    into: int


class Attempt:
    """One attempt at a window: running out of memory ends it, and nothing else.

    Any other error leaves as it came, after buffers and random state are put back. Without the
    state `before` it, it is the only attempt, and running out of memory leaves as well.
    """

    def __init__(
        self,
        micros: Sequence[Any],
        inside: AbstractContextManager[Any],
        before: ForwardState | None = None,
    ) -> None:
        self.micros = micros
        self.failure: str | None = None
        """The first line of the error that ended it. The error itself is not kept: its traceback
        holds every frame of the attempt, and those hold the tensors that must be gone."""
        self._before, self._inside = before, inside

    def __enter__(self) -> Attempt:
        self._inside.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        self._inside.__exit__(kind, error, traceback)
        if error is None or self._before is None:
            return False
        if isinstance(error, torch.OutOfMemoryError):
            self.failure = str(error).split("\n")[0]
            return True
        with suppress(RuntimeError):  # of a device that has failed for good
            self._before.restore()  # nothing of the window is left behind
        return False


class Fitting:
    """The windows of a `WholeBatch`: split by `sizes`, chosen by `choice`, and recovered here."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: torch.optim.Optimizer,
        *,
        micro_batch: int | Tokens | str | None,
        memory: Budget | None,
        precision: str,
        layout: dict[str, Any],
        sync: Sync,
        is_undivided: Callable[[], bool],
        frees_memory: Callable[[], bool],
        optimizer_state: str = "device",
    ) -> None:
        _refuse_without_parameters(model)
        is_auto = micro_batch == "auto"
        if sync.counts_must_agree and (is_auto or memory is not None):
            raise OptionError(
                'micro_batch="auto" or memory= on a sharded model that is not gathered: its '
                "collectives cannot start again with smaller micro-batches; give micro_batch= as "
                'a number of samples, or close=wb.Close(sync="gathered") where whole parameters '
                "and gradients fit"
            )
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.sizes = WindowSplit(micro_batch, layout)
        self.choice = MicroBatchChoice(
            inner,
            loss,
            optimizer,
            memory,
            precision,
            layout,
            sync,
            state_on_device=optimizer_state == "device",
        )
        # On several ranks only where it was asked for: the reduction then waits for the window.
        self.recovers = not sync.counts_must_agree and (
            sync.ranks == 1 or is_auto or memory is not None
        )
        self.recovered: list[Recovered] = []
        # Copying Python's and NumPy's generators costs 0.1 ms, and few forwards draw from them.
        self._model = model
        self._draws_on_host: bool | None = None
        self._optimizer, self._sync = optimizer, sync
        self._is_undivided, self._frees_memory = is_undivided, frees_memory
        self._undivided: UndividedBatch | None = None  # once a batch must not be split

    @property
    def size(self) -> int | None:
        """Samples that were found to fit; None if what was given does, or before "auto" chose."""
        if self._undivided is not None and self._is_undivided():
            return self.sizes.samples
        return self.sizes.size

    @property
    def said(self) -> str | None:
        """The choice of "auto" and its reason, in two lines; None before it has chosen."""
        return self.choice.said

    def split(self, batch: Any) -> list[Any]:
        """Return the micro-batches of this batch, or of several `Batches`."""
        batches = batch if isinstance(batch, Batches) else (batch,)
        if not self._is_undivided():
            return self.sizes.micro_batches(batches, self.choice)
        whole, given = self.sizes.undivided(batches), self.sizes.given
        if self._undivided is None:
            self._undivided = UndividedBatch(self.choice.model)
            if isinstance(given, int) and given < self.sizes.samples:
                _log.warning(
                    "micro_batch=%d: a BatchNorm trains with the statistics of the whole batch, so "
                    "the batch is not split; if it does not fit, its blocks are checkpointed",
                    given,
                )
        return [whole]

    def join(self) -> None:
        """Take part in the other ranks' choice, without a batch."""
        if self.sizes.given == "auto" and self.sizes.fits is None:
            self.sizes.fits = self.choice.join()

    def attempts(
        self, batch: Any, micros: Sequence[Any], discard: Callable[[], None]
    ) -> Iterator[Attempt]:
        """Yield attempts at the window of this batch until one fits.

        `with attempt:` makes the forwards and backwards of `attempt.micros` and nothing after them.
        `discard()` drops what a failed attempt has added.
        """
        before = ForwardState(self._model, every=self._draws_on_host is not False)
        share = 1 / 2 if self.said is None else _STEPS_BACK
        for _ in range(_MOST):
            attempt = Attempt(micros, self.inside(), before)
            yield attempt
            if attempt.failure is None:
                break
            discard()
            before.restore()
            free_caches()  # a failed backward leaves cycles between graph and hooks
            micros, share = self._smaller(batch, attempt, share), 1 / 2
        else:
            raise torch.OutOfMemoryError(
                f"out of memory {_MOST} times in one window, the last time with {len(micros)} "
                "micro-batches: something else is filling the memory; give a smaller micro-batch "
                "or a smaller memory= than what is free"
            )
        if self._draws_on_host is None:
            self._draws_on_host = not before.draws_same(ForwardState(), host=True)
        on_cuda = self.choice.device.type == "cuda"
        if self.sizes.given == "auto" and on_cuda and not self._optimizer.state:
            # The first update makes the optimizer's state. In the gaps of the freed activations it
            # would hold on to all of their memory.
            torch.cuda.empty_cache()

    def _smaller(self, batch: Any, attempt: Attempt, share: float) -> Sequence[Any]:
        """Return the micro-batches of the next attempt, after one that ran out of memory."""
        failure = attempt.failure or ""
        if self._frees_memory():
            return attempt.micros
        if self._undivided is not None and self._is_undivided():
            self._undivided.save_memory(failure)
            return attempt.micros
        samples = self.sizes.largest
        if samples == 1:
            raise torch.OutOfMemoryError(
                f"a micro-batch of one sample does not fit ({failure}); {self.choice.ways}"
            )
        micros = self.sizes.smaller(attempt.micros, share, lambda: self.split(batch))
        into = self.sizes.largest
        self.recovered.append(Recovered(samples, into))
        _log.warning(
            "out of memory: micro-batches of %d samples are now of %d at most, and the window "
            "starts again (%s)",
            samples,
            into,
            failure,
        )
        return micros

    def may_begin_again(self) -> bool:
        """True if a window that runs out of memory can begin again.

        On several ranks, one that begins again would leave the others waiting in a BatchNorm.
        """
        return self.recovers and (self._sync.ranks == 1 or not self._is_undivided())

    def agree(self, failure: torch.OutOfMemoryError | None = None) -> None:
        """End the window on all ranks if one of them has no memory for its smallest size."""
        failed = failure is not None
        if self._sync.ranks > 1 and self.may_begin_again():
            failed = self._sync.group.sum([float(failed)])[0] > 0
        if failure is not None and self._undivided is not None and self._sync.ranks > 1:
            self._undivided.save_memory(str(failure).split("\n")[0], may_change=False)
        if failure is not None:
            raise failure
        if failed:
            raise RankError(
                "another rank ran out of memory with a micro-batch of one sample; see its message. "
                "No rank has made this update"
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run forwards and backwards within the budget; save memory as an undivided batch must."""
        is_whole = self._undivided is not None and self._is_undivided()
        limit_allocator(self.choice.budget, self.choice.device)
        with self._undivided.running() if self._undivided and is_whole else nullcontext():
            yield


def _refuse_without_parameters(model: nn.Module) -> None:
    if next(model.parameters(), None) is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no parameters, so there is nothing to train and no device "
            "for the micro-batches: put the trained parameters into the model, or use "
            "wb.Accumulator"
        )
