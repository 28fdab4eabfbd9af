"""The split of a batch into micro-batches, and recovery if one runs out of memory."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch import Batches, Tokens, batch_size_of, joined, split_numbered
from wholebatch.batch.samples import flatten, layout_of, readable_layout
from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, RankError, UnsupportedError
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.make_it_fit import ladder, refusal
from wholebatch.memory.out_of_memory import Attempt, Recovery, within
from wholebatch.memory.predict import simulating, state_bytes
from wholebatch.memory.trial_step import held_bytes, measure_step, trial_peak
from wholebatch.memory.undivided_batch import UndividedBatch
from wholebatch.readable_sizes import bytes_said
from wholebatch.window.precision import LossScale

_log = logging.getLogger("wholebatch")
_FOUND = ("fits", "fitting_bytes", "size")
_STEPS_BACK = 7 / 8
"""The share of a size that is tried next if a step of that size was measured to fit."""


@dataclass(frozen=True)
class Recovered:
    """One recovery: the samples of the largest micro-batch, before and after."""

    samples: int
    into: int


class Fitting:
    """Sizes of micro-batches: as given, or the largest that is measured to fit.

    `micro_batch="auto"` chooses when the first batch is there: by real steps whose effects are
    undone on CUDA or where a budget was given (`memory="20GiB"`, `0.5`, `"free"`), else it takes
    the whole batch. A window that runs out of memory all the same begins again with smaller
    micro-batches, and no later micro-batch has as many bytes as the one that failed: batches of
    shorter sequences keep their size. With `micro_batch=None` each batch is one micro-batch, unless
    it does not fit.
    """

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
        scale: LossScale | None,
        sync: Sync,
        is_undivided: Callable[[], bool],
        frees_memory: Callable[[], bool],
        optimizer_state: str = "device",
    ) -> None:
        self._optimizer_state = optimizer_state
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._loss = loss
        self._optimizer = optimizer
        self._micro_batch = micro_batch
        self._precision = precision
        self._layout = layout
        self._sync = sync
        self._is_undivided = is_undivided
        self._frees_memory = frees_memory
        self._undivided: UndividedBatch | None = None  # once a batch must not be split
        self._device = _device_of(model)
        self._budget = None if memory is None else self._bytes(memory)
        is_auto = micro_batch == "auto"
        if sync.counts_must_agree and (is_auto or memory is not None):
            raise OptionError(
                'micro_batch="auto" or memory= on a sharded model that is not gathered: its '
                "collectives cannot start again with smaller micro-batches; give micro_batch= as "
                'a number of samples, or close=wb.Close(sync="gathered") where whole parameters '
                "and gradients fit"
            )
        # On several ranks only where it was asked for: the reduction then waits for the window.
        self.recovers = not sync.counts_must_agree and (
            sync.ranks == 1 or is_auto or memory is not None
        )
        self._recovery = Recovery(model, scale=scale)
        self.recovered: list[Recovered] = []
        self._fits: int | None = None
        """Samples that "auto" has chosen; or tokens of a micro-batch, once those given failed."""
        self._fitting_bytes: float | None = None
        """Bytes that a micro-batch may have, once a larger one has failed."""
        self._size: int | None = None
        """Samples of a micro-batch of the last window, where they were chosen or learned."""
        self.said: str | None = None
        """The choice of "auto" and its reason, in two lines; None before it has chosen."""
        self._numbers: list[Sequence[int]] = []  # of each micro-batch, its samples' places
        self._ends: list[int] = []  # of each batch that was split last, the samples up to its end

    @property
    def size(self) -> int | None:
        """Samples that were found to fit; None if what was given does, or before "auto" chose."""
        if self._undivided is not None and self._is_undivided():
            return self.samples
        return self._size

    def split(self, batch: Any) -> list[Any]:
        """Return the micro-batches of this batch, or of several `Batches`.

        A number of samples splits each batch by itself; "auto" and tokens join them first, if that
        is possible.
        """
        batches = batch if isinstance(batch, Batches) else (batch,)
        if self._is_undivided():
            return [self._whole(batches)]
        whole = self._joined(batches)
        pieces = batches if whole is None else (whole,)
        if self._micro_batch == "auto" and self._fits is None:
            self._fits = self._chosen_size(pieces)
        micros: list[Any] = []
        self._numbers, self._ends = [], []
        for piece in pieces:
            start = self._ends[-1] if self._ends else 0
            parts = self._parts(piece)
            self._ends.append(start + sum(len(numbers) for _, numbers in parts))
            micros += [micro for micro, _ in parts]
            self._numbers += [[start + n for n in numbers] for _, numbers in parts]
        if whole is not None:
            sizes = (batch_size_of(piece, **self._layout) for piece in batches)
            self._ends = list(accumulate(sizes))
        return micros

    def _whole(self, batches: Sequence[Any]) -> Any:
        """Return the batch, or several as one, for a model that must see all of it at once."""
        by = self._micro_batch if isinstance(self._micro_batch, Tokens) else None
        whole = batches[0] if len(batches) == 1 else joined(batches, by, **self._layout)
        if whole is None:
            raise UnsupportedError(
                f"a window of {len(batches)} batches that cannot be joined into one (they differ "
                "in more than their number of samples), and a BatchNorm trains with the "
                "statistics of all of them: pad them to one length, or use "
                'batchnorm="freeze" or GroupNorm layers'
            )
        self._ends = list(accumulate(map(self._samples_of, batches)))
        self._numbers = [range(self._ends[-1])]
        if self._undivided is None:
            self._undivided = UndividedBatch(self._model)
            if isinstance(self._micro_batch, int) and self._micro_batch < self._ends[-1]:
                _log.warning(
                    "micro_batch=%d: a BatchNorm trains with the statistics of the whole batch, so "
                    "the batch is not split; if it does not fit, its blocks are checkpointed",
                    self._micro_batch,
                )
            if self._sync.ranks > 1:  # no rank can begin a window again without the others
                self._try_settings(self._undivided, whole)
        return whole

    def _try_settings(self, undivided: UndividedBatch, whole: Any) -> None:
        """Find the first setting that fits on all ranks, by steps whose effects are undone."""
        limit = self._budget if self._device.type == "cpu" else None
        failure = None
        if self._device.type == "cuda":
            within(self._budget, model=self._model)
        while limit is not None or self._device.type == "cuda":
            try:
                with undivided.running():
                    how: dict[str, Any] = {"precision": self._precision, "limit": limit}
                    measure_step(self._model, self._loss, [whole], **how)
                break
            except torch.OutOfMemoryError as error:
                failure = str(error).split("\n")[0]
            if undivided.place + 1 == len(undivided.settings):
                break
            undivided.save_memory(failure)
            failure = None
        undivided.place = int(self._sync.group.largest_number(undivided.place))
        failed = self._sync.group.sum([float(failure is not None)])[0]
        if failed:
            undivided.place = len(undivided.settings) - 1
            undivided.save_memory(failure or "on another rank")

    def _joined(self, batches: Sequence[Any]) -> Any:
        """Return several batches as one, where micro-batches need not stay within one of them."""
        by = self._micro_batch
        if len(batches) == 1 or not (by == "auto" or isinstance(by, Tokens)):
            return None
        return joined(batches, by if isinstance(by, Tokens) else None, **self._layout)

    def _parts(self, batch: Any) -> list[tuple[Any, Sequence[int]]]:
        """Return the micro-batches of one batch, with the places of their samples in it."""
        size = self._size_for(batch)
        if isinstance(size, int):
            return layout_of(batch, **self._layout).parts(size)
        if size is not None:
            return split_numbered(batch, size, **self._layout)
        return [(batch, range(self._samples_of(batch)))]

    def _samples_of(self, batch: Any) -> int:
        layout = readable_layout(batch, **self._layout)
        return 1 if layout is None else layout.size

    def _size_for(self, batch: Any) -> int | Tokens | None:
        """Return what was given or chosen, or as much of it as was found to fit."""
        asked = self._micro_batch
        if isinstance(asked, Tokens):
            return asked if self._fits is None else replace(asked, budget=self._fits)
        size = self._fits if isinstance(asked, str) else asked
        if self._fitting_bytes is not None:
            samples = self._samples_of(batch)
            share = self._fitting_bytes / _bytes_of(batch, samples)
            most = max(1, int(samples * share + 1e-6))
            size = most if size is None else min(size, most)
        if size != asked:
            self._size = size
        return size

    def _chosen_size(self, batches: Sequence[Any]) -> int:
        """Return how many samples "auto" takes; it chooses on the largest batch."""
        largest = max(batches, key=lambda batch: batch_size_of(batch, **self._layout))
        samples = batch_size_of(largest, **self._layout)
        return min(self._agreed_choice(largest, samples), samples)

    def largest_of(self, batches: Sequence[Any]) -> Any:
        """Return the batch with the most samples of those that were split last."""
        sizes = [end - start for start, end in pairwise([0, *self._ends])]
        return batches[sizes.index(max(sizes))]

    @property
    def samples(self) -> int:
        """Samples in the batch that was split last."""
        return sum(map(len, self._numbers))

    def batch_of_each(self) -> list[int]:
        """Return the place of each micro-batch's batch among those that were split last."""
        firsts = ([*numbers, 0][0] for numbers in self._numbers)  # a filled row has none
        return [bisect_right(self._ends, first) for first in firsts]

    def attempts(
        self, batch: Any, micros: Sequence[Any], discard: Callable[[], None]
    ) -> Iterator[Attempt]:
        """Yield attempts at the window of this batch until one fits."""
        before = len(self.recovered)

        def smaller(attempt: Attempt) -> Sequence[Any]:
            was_measured = self.said is not None and len(self.recovered) == before
            return self._smaller(batch, attempt, _STEPS_BACK if was_measured else 1 / 2)

        yield from self._recovery.attempts(
            micros, discard=discard, smaller=smaller, inside=self.inside
        )
        is_auto = self._micro_batch == "auto"
        if is_auto and self._device.type == "cuda" and not self._optimizer.state:
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
        samples = max(map(len, self._numbers))
        if samples == 1:
            raise torch.OutOfMemoryError(
                f"a micro-batch of one sample does not fit ({failure}); what would make it fit: "
                "precision='bf16', activation checkpointing (wholebatch.memory.with_checkpoints), "
                "shorter samples, or a sharded model"
            )
        before, micros = self._numbers, attempt.micros
        largest = max(_bytes_of(*pair) for pair in zip(micros, map(len, before), strict=True))
        while self._numbers == before:  # a budget that is a little smaller may change nothing
            if isinstance(self._micro_batch, Tokens):
                self._fits = max(1, int((self._fits or self._micro_batch.budget) * share))
            else:
                largest = self._fitting_bytes = largest * share
            micros = self.split(batch)
        into = max(map(len, self._numbers))
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
        budget = within(self._budget, model=self._model, optimizer=self._optimizer)
        saving = self._undivided.running() if self._undivided and is_whole else nullcontext()
        with saving, budget:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found to fit, and what they were found for."""
        values = {name: getattr(self, f"_{name}") for name in _FOUND}
        return {"given": str(self._micro_batch), **values}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with those sizes, unless another `micro_batch` is given now."""
        if saved["given"] == str(self._micro_batch):
            for name in _FOUND:
                setattr(self, f"_{name}", saved[name])

    def _bytes(self, memory: Budget) -> int:
        return parse_memory(
            memory,
            device=self._device,
            held=held_bytes(self._model, self._optimizer),
            processes=sharing_processes(self._device, self._sync.ranks),
        )

    def _agreed_choice(self, batch: Any, samples: int) -> int:
        """The smallest over the ranks: all split alike, or all end if one cannot."""
        problem: Exception | None = None
        chosen = 0
        try:
            chosen = self._choose(batch, samples)
        except Exception as error:
            problem = error
        chosen = int(self._smallest(chosen))
        if problem is not None:
            raise problem
        if chosen == 0:
            raise RankError(
                "another rank found no micro-batch that fits its memory; see its message"
            )
        return chosen

    def _smallest(self, number: float) -> float:
        return -self._sync.group.largest_number(-number)

    def join(self) -> None:
        """Take part in the other ranks' choice, without a batch."""
        if self._micro_batch == "auto" and self._fits is None:
            self._fits = int(self._smallest(math.inf)) or None

    def _choose(self, batch: Any, samples: int) -> int:
        """Measure real steps of 1, 2, 4, … samples, and return the largest size that fits."""
        on_cuda = self._device.type == "cuda"
        if self._budget is None and not on_cuda:
            return samples
        budget = self._budget or self._bytes("free")
        if on_cuda:  # in force from here on, for the trial steps too
            within(self._budget, model=self._model)
        on_device = self._optimizer_state == "device"
        missing = self._missing_state() if on_device else 0

        def peak(size: int) -> int | None:
            return trial_peak(
                self._model,
                self._loss,
                self._trial_window(batch, size, samples),
                optimizer=self._optimizer if on_device else None,
                precision=self._precision,
                budget=budget,
                missing_state=missing,
            )

        choice = choose_micro_batch(peak, budget=budget, most=samples)
        if choice is None:
            raise OptionError(self._refusal(batch, budget))
        self.said = choice.summary()
        _log.info("%s", self.said)
        return choice.micro_batch

    def _trial_window(self, batch: Any, size: int, samples: int) -> list[Any]:
        """Return micro-batches that need the memory of a window of this size.

        From the second one on there are gradients beside the activations. On CUDA the smaller last
        one follows: it leaves the freed memory in other pieces.
        """
        static = self._layout["static"]
        micro = resize_batch(batch, size, static=static)
        if self._device.type != "cuda":
            return [micro, micro]
        last = resize_batch(batch, samples % size or size, static=static)
        return [micro, micro, last]

    def _missing_state(self) -> int:
        """Return the bytes of optimizer state that the first update will create."""
        there = held_bytes(self._model, self._optimizer) - held_bytes(self._model)
        try:
            return max(0, state_bytes(self._model, self._optimizer) - there)
        except Exception:  # An optimizer may do anything. Most have at most two moments.
            weights = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
            return max(0, 2 * weights - there)

    def _refusal(self, batch: Any, budget: int) -> str:
        """Return why nothing fits, and what would, as far as that can be predicted."""
        sample = resize_batch(batch, 1, static=self._layout["static"])
        try:
            with simulating(self._model, self._loss, optimizer=self._optimizer) as simulation:
                rungs = ladder(simulation, sample, budget=budget, precision=self._precision)
        except UnsupportedError:
            return f"memory={bytes_said(budget)}: a micro-batch of one sample does not fit"
        is_sharded = any(isinstance(p, DTensor) for p in self._model.parameters())
        return refusal(rungs, budget, is_sharded=is_sharded)


def _bytes_of(batch: Any, samples: int) -> float:
    """Return the bytes of a batch's tensors; its number of samples if it has none."""
    leaves, _ = flatten(batch)
    tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, Tensor))
    return float(sum(tensor.nbytes for tensor in tensors) or samples)


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no parameters, so there is nothing to train and no device "
            "for the micro-batches: put the trained parameters into the model, or use "
            "wb.Accumulator"
        )
    return first.device
