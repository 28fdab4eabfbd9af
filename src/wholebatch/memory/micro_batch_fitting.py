"""The split of a batch into micro-batches, and recovery if one runs out of memory."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch import Batches, Tokens, batch_size_of, joined, split_numbered, to_device
from wholebatch.batch.samples import layout_of, readable_layout
from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, RankError, UnsupportedError
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.make_it_fit import ladder, refusal
from wholebatch.memory.out_of_memory import Attempt, Recovered, Recovery, within
from wholebatch.memory.predict import state_bytes
from wholebatch.memory.trial_step import TrialSteps, held_bytes, measure_step
from wholebatch.memory.undivided_batch import UndividedBatch
from wholebatch.readable_sizes import bytes_said
from wholebatch.window.precision import LossScale

_log = logging.getLogger("wholebatch")


class Fitting:
    """Sizes of micro-batches: as given, or the largest that is measured to fit.

    `micro_batch="auto"` chooses when the first batch is there: by real steps whose effects are
    undone on CUDA or where a budget was given (`memory="20GiB"`, `0.5`, `"free"`), else it takes
    the whole batch. A window that runs out of memory all the same begins again with smaller
    micro-batches. If the next one does too, later windows begin with the size that went through:
    one failure alone may be a long sequence. With `micro_batch=None` each batch is one micro-batch,
    unless it does not fit.
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
                'micro_batch="auto" or memory= on a sharded model: its collectives cannot start '
                "again with smaller micro-batches; give micro_batch= as a number of samples"
            )
        # On several ranks only where it was asked for: the reduction then waits for the window.
        self.recovers = not sync.counts_must_agree and (
            sync.ranks == 1 or is_auto or memory is not None
        )
        self._recovery = Recovery(model, scale=scale, static=layout["static"])
        self._fits: int | None = None
        """Samples (or tokens, where those were given) of a micro-batch, as chosen or learned."""
        self._has_failed = False  # the last window ran out of memory
        self.said: str | None = None
        """The choice of "auto" and its reason, in two lines; None before it has chosen."""
        self._split: list[tuple[int, Sequence[int]]] = []  # by identity: no batch is kept alive
        self._ends: list[int] = []  # of each batch that was split last, the samples up to its end

    @property
    def recovered(self) -> list[Recovered]:
        return self._recovery.recovered

    @property
    def size(self) -> int | None:
        """Samples that were found to fit; None if what was given does, or before "auto" chose."""
        if self._undivided is not None and self._is_undivided():
            return self.samples
        return None if isinstance(self._micro_batch, Tokens) else self._fits

    def split(self, batch: Any) -> list[Any]:
        """Return the micro-batches of this batch, or of several `Batches`.

        A number of samples splits each batch by itself; "auto" and tokens join them first, if that
        is possible.
        """
        batches = batch if isinstance(batch, Batches) else (batch,)
        if self._is_undivided():
            return [self._whole(batches)]
        whole = self._joined(batches)
        given = batches if whole is None else (whole,)
        size = self._chosen_size(given) if self._micro_batch == "auto" else self._fitting_size()
        split: list[tuple[Any, Sequence[int]]] = []
        self._ends = []
        for one in given:
            start = self._ends[-1] if self._ends else 0
            parts = self._parts(one, size)
            self._ends.append(start + sum(len(numbers) for _, numbers in parts))
            if start:
                parts = [(micro, [start + n for n in numbers]) for micro, numbers in parts]
            split += parts
        if whole is not None:
            sizes = (batch_size_of(one, **self._layout) for one in batches)
            self._ends = list(accumulate(sizes))
        self._split = [(id(micro), numbers) for micro, numbers in split]
        return [micro for micro, _ in split]

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
        layouts = [readable_layout(one, **self._layout) for one in batches]
        self._ends = list(accumulate(1 if one is None else one.size for one in layouts))
        self._split = [(id(whole), range(self._ends[-1]))]
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
                    micro = to_device(whole, self._device)
                    how: dict[str, Any] = {"precision": self._precision, "limit": limit}
                    measure_step(self._model, self._loss, micro, micro_batches=1, **how)
                break
            except torch.OutOfMemoryError as error:
                failure = str(error).split("\n")[0]
            if undivided.place + 1 == len(undivided.settings):
                break
            undivided.save_memory(failure)
            failure = None
        place = torch.tensor(float(undivided.place), device=self._device)
        undivided.place = int(self._sync.largest(place))
        failed = self._sync.sum([float(failure is not None)])[0]
        if failed:
            undivided.place = len(undivided.settings) - 1
            undivided.save_memory(failure or "on another rank")

    def _joined(self, batches: Sequence[Any]) -> Any:
        """Return several batches as one, where micro-batches need not stay within one of them."""
        by = self._micro_batch
        if len(batches) == 1 or not (by == "auto" or isinstance(by, Tokens)):
            return None
        return joined(batches, by if isinstance(by, Tokens) else None, **self._layout)

    def _parts(self, batch: Any, size: int | Tokens | None) -> list[tuple[Any, Sequence[int]]]:
        """Return the micro-batches of one batch, with the places of their samples in it."""
        if isinstance(size, int):
            return layout_of(batch, **self._layout).parts(size)
        if size is not None:
            return split_numbered(batch, size, **self._layout)
        layout = readable_layout(batch, **self._layout)
        return [(batch, range(1 if layout is None else layout.size))]

    def _chosen_size(self, batches: Sequence[Any]) -> int:
        """Return how many samples "auto" takes; it chooses on the largest batch."""
        if self._fits is None:
            largest = max(batches, key=lambda batch: batch_size_of(batch, **self._layout))
            samples = batch_size_of(largest, **self._layout)
            self._fits = min(self._agreed_choice(largest, samples), samples)
        return self._fits

    def largest_of(self, batches: Sequence[Any]) -> Any:
        """Return the batch with the most samples of those that were split last."""
        sizes = [end - start for start, end in pairwise([0, *self._ends])]
        return batches[sizes.index(max(sizes))]

    def _fitting_size(self) -> int | Tokens | None:
        """Return what was given, or as much of it as was found to fit."""
        given = self._micro_batch
        assert not isinstance(given, str)
        if self._fits is None:
            return given
        return replace(given, budget=self._fits) if isinstance(given, Tokens) else self._fits

    def _learn(self, recovered: Sequence[Recovered]) -> None:
        """Begin later windows with what fits, if two windows in a row ran out of memory."""
        for recovery in recovered:
            _log.warning(
                "out of memory: a micro-batch of %d samples was cut into %d, and the window "
                "started again",
                recovery.samples,
                recovery.into,
            )
        is_second, self._has_failed = self._has_failed and bool(recovered), bool(recovered)
        if not is_second:
            return
        if isinstance(self._micro_batch, Tokens):
            now = self._fits or self._micro_batch.budget
            self._fits, unit = max(1, int(now * _share_left(recovered))), "tokens"
        else:
            self._fits, unit = min(recovery.into for recovery in recovered), "samples"
        _log.warning(
            "micro_batch=%s does not fit: from now on micro-batches have %d %s",
            self._micro_batch,
            self._fits,
            unit,
        )

    @property
    def samples(self) -> int:
        """Samples in the batch that was split last."""
        return sum(len(numbers) for _, numbers in self._split)

    def numbers_of(self, parts: Sequence[Any]) -> list[list[int]]:
        """Of each part, its samples' places in the batch that was split last; cut or not."""
        sizes = {micro: len(numbers) for micro, numbers in self._split}
        order = [number for _, numbers in self._split for number in numbers]
        found: list[list[int]] = []
        start = 0
        for part in parts:  # a cut leaves the order as it was
            size = sizes.get(id(part)) or batch_size_of(part, static=self._layout["static"])
            found.append(order[start : start + size])
            start += size
        return found

    def batch_of(self, parts: Sequence[Any]) -> list[int]:
        """Return the place of each part's batch among those that were split last."""
        firsts = ([*numbers, 0][0] for numbers in self.numbers_of(parts))  # a filled row has none
        return [bisect_right(self._ends, first) for first in firsts]

    def attempts(self, micros: Sequence[Any], discard: Callable[[], None]) -> Iterator[Attempt]:
        """Yield attempts at a window until one fits; later windows begin with its sizes."""
        seen = len(self.recovered)
        yield from self._recovery.attempts(
            micros, discard=discard, relieved=self._relieved, inside=self.inside
        )
        is_auto = self._micro_batch == "auto"
        if is_auto and self._device.type == "cuda" and not self._optimizer.state:
            # The first update makes the optimizer's state. In the gaps of the freed activations it
            # would hold on to all of their memory.
            torch.cuda.empty_cache()
        self._learn(self.recovered[seen:])

    def may_begin_again(self) -> bool:
        """True if a window that runs out of memory can begin again.

        On several ranks, one that begins again would leave the others waiting in a BatchNorm.
        """
        return self.recovers and (self._sync.ranks == 1 or not self._is_undivided())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run forwards and backwards within the budget; save memory as an undivided batch must."""
        is_whole = self._undivided is not None and self._is_undivided()
        budget = within(self._budget, model=self._model, optimizer=self._optimizer)
        saving = self._undivided.running() if self._undivided and is_whole else nullcontext()
        with saving, budget:
            yield

    def _relieved(self, failure: str) -> bool:
        """Save memory after running out of it; True if the micro-batches can stay as they are."""
        if self._frees_memory():
            return True
        if self._undivided is None or not self._is_undivided():
            return False
        self._undivided.save_memory(failure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the size that was found to fit, and what it was found for."""
        return {"fits": self._fits, "given": str(self._micro_batch)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with that size, unless another `micro_batch` is given now."""
        if saved["given"] == str(self._micro_batch):
            self._fits = saved["fits"]

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
            if self._sync.ranks == 1:
                raise
            problem = error
        if self._sync.ranks > 1:
            chosen = -int(self._sync.largest(torch.tensor(-float(chosen), device=self._device)))
        if problem is not None:
            raise problem
        if chosen == 0:
            raise RankError(
                "another rank found no micro-batch that fits its memory; see its message"
            )
        return chosen

    def _choose(self, batch: Any, samples: int) -> int:
        """Measure real steps of 1, 2, 4, … samples, and return the largest size that fits."""
        on_cuda = self._device.type == "cuda"
        if self._budget is None and not on_cuda:
            return samples
        budget = self._budget or self._bytes("free")
        if on_cuda:  # in force from here on, for the trial steps too
            within(self._budget, model=self._model)
        on_device = self._optimizer_state == "device"
        trial = TrialSteps(
            self._model,
            self._loss,
            self._optimizer if on_device else None,
            self._precision,
            budget,
            self._missing_state() if on_device else 0,
        )
        static = self._layout["static"]

        def peak(size: int) -> int | None:
            micro = resize_batch(batch, size, static=static)
            return trial.peak(micro, micro_batches=1 if size == samples else 2)

        choice = choose_micro_batch(peak, budget=budget, most=samples)
        if choice is None:
            raise OptionError(self._refusal(batch, budget))
        self.said = choice.summary()
        _log.info("%s", self.said)
        return choice.micro_batch

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
            rungs = ladder(
                self._model,
                self._loss,
                sample,
                budget=budget,
                optimizer=self._optimizer,
                precision=self._precision,
            )
        except UnsupportedError:
            return f"memory={bytes_said(budget)}: a micro-batch of one sample does not fit"
        return refusal(rungs, budget)


def _share_left(recovered: Sequence[Recovered]) -> float:
    """Return the smallest share of its micro-batch that repeated cuts have left."""
    least = share = 1.0
    half = 0
    for recovery in recovered:
        share = (share if recovery.samples == half else 1.0) * recovery.into / recovery.samples
        half, least = recovery.into, min(least, share)
    return least


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no parameters, so there is nothing to train and no device "
            "for the micro-batches: put the trained parameters into the model, or use "
            "wb.Accumulator"
        )
    return first.device
