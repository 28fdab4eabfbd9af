"""When the test of a loss is made, on which samples, and on which ranks.

Entry points that run the forward have one `LossTest`, and call it before every split window.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from wholebatch.audit.adds_up import (
    SAMPLES,
    AdditivityResult,
    check_adds_up,
    free_memory_of_test,
    unrunnable,
)
from wholebatch.audit.check import silenced
from wholebatch.audit.finding import OF_STATE, UNTESTED, Findings, refuse
from wholebatch.audit.layers import refused_by_type
from wholebatch.batch.samples import Layout, readable_layout
from wholebatch.distributed.process_group import Group
from wholebatch.losses.loss import as_loss
from wholebatch.warn_user import warn_user
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.reachable_objects import own_generators
from wholebatch.window.window import is_tested_window

_log = logging.getLogger("wholebatch")
_NOT_TESTED = "the loss was not tested to add up over micro-batches: %s"
_TRIES = 8
"""The windows in which a test that told nothing is made again."""


class LossTest:
    """Tests in windows 1, 2, 4, 8, ... that the loss adds up over micro-batches.

    Its samples are spread over the batch: up to 8 the first time, later as many as a micro-batch
    has, which shows couplings among many samples. A batch whose samples have no units tells
    nothing: the next window is tested then. A number of samples that ran out of memory is not tried
    again. All ranks of the group test the same windows; what one finds, all refuse.

    Args:
        model: All modules that the loss uses.
        group: The ranks that test together.
        enabled: False tests nothing.
        shares_forwards: A forward meets the other ranks (FSDP, DeepSpeed), so that every rank makes
            the same runs, and no gradient is compared.
        off: How a user trains all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        enabled: bool,
        shares_forwards: bool = False,
        off: str = "audit=False",
    ) -> None:
        self._model, self._group, self._off = model, group, off
        self._enabled, self._shares_forwards = enabled, shares_forwards
        self._windows = 0
        self.turn = 0
        """The number of tests so far: in a loop, each takes another micro-batch."""
        self._tries = _TRIES
        """How often the first test is made again, if it told nothing; 0 once it has told."""
        self.is_due = False
        """True if the window that has begun is to be tested, and was not yet."""
        self._has_told = False  # that the loss was not tested
        self._most = math.inf  # samples that fit into memory, as far as is known

    def begin_window(self) -> bool:
        """Count a window that is split; return True if it is to be tested."""
        self.is_due = self.is_next_due
        self._windows += 1
        return self.is_due

    @property
    def is_next_due(self) -> bool:
        """True if the next window is to be tested."""
        return self._enabled and (self._tries > 0 or is_tested_window(self._windows + 1))

    def test(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        micros: Sequence[Any] = (),
        layout: Mapping[str, Any] | None = None,
        *,
        outputs: bool = False,
        name: str = "the loss function",
    ) -> None:
        """Refuse a loss that does not add up, on all ranks.

        `micros` are the micro-batches of `batch`, and `layout` says how it was split. Without
        micro-batches nobody has said that its rows are samples: what may be right for one graph or
        one document is then warned of.
        """
        self.is_due = False
        self.turn += 1
        read = _layout_of(batch, layout)
        if read is None:
            self._tell(
                f"the rows of a {type(batch).__name__} are not known to be samples: its tensors "
                "have different numbers of rows, or it cannot be taken apart. wb.verify compares "
                "whole updates"
            )
        result = AdditivityResult(conclusive=False)
        if self._all(read is not None and read.size > 1 and self._most > 1):
            assert read is not None
            check = partial(check_adds_up, self._model, run, read, outputs=outputs, name=name)
            result = self._result(check, run, read, micros, is_loss=not outputs, name=name)
        findings = result.findings if micros else self._certain(result.findings)
        self._end((*refused_by_type(self._model), *findings), result.conclusive)

    def join(self) -> None:
        """Take part in the other ranks' test, without a sample of one's own."""
        if self.is_due:
            self.is_due = False
            self._all(False)
            self._end((), False)

    def _result(
        self,
        check: Callable[..., AdditivityResult],
        run: Callable[[Any], Any],
        layout: Layout,
        micros: Sequence[Any],
        *,
        is_loss: bool,
        name: str,
    ) -> AdditivityResult:
        """Compare samples of this window, on this rank."""
        sizes = [read.size if (read := _layout_of(m, None)) else 1 for m in micros[:-1]]
        micro = min([*sizes, layout.size])
        count = int(min(max(2, micro), self._most, SAMPLES if self._tries else math.inf))
        try:
            # Two samples with a graph take more memory than a micro-batch of one.
            result = check(count=count, gradients=not self._shares_forwards and micro > 1)
            if count < 4 and not (result.findings or self._shares_forwards):
                # So few may add up by chance. More of them have room without a graph.
                more = check(count=int(min(2 * count + 1, self._most)), gradients=False)
                told = result.conclusive or more.conclusive
                result = AdditivityResult(more.findings, told)
        except torch.OutOfMemoryError:
            self._most = count // 2
            why = f"{count} samples ran out of memory in the test, and are not tried again"
            _log.warning(_NOT_TESTED, why)
            return AdditivityResult()
        except Exception as error:  # most often the loss's own, and the step will raise it
            free_memory_of_test()  # Not earlier: an error holds the tensors of its frames.
            every = layout.take(slice(None))
            runs = partial(self._runs, run, is_loss=is_loss)
            is_run = self._shares_forwards or runs(micros[0] if micros else every)
            # A single row may run all the same: it broadcasts with what is no value per sample.
            if micros and not self._shares_forwards and (micro == 1 or not is_run) and runs(every):
                found = unrunnable(layout, layout.size, name, error)
                return AdditivityResult((found,), conclusive=False)
            if is_run:
                self._tell(f"{count} samples could not be run ({error!r})")
            return AdditivityResult(conclusive=False)
        return result

    def _certain(self, findings: Findings) -> Findings:
        """Warn of what holds only if rows are samples; return what is so in any case."""
        certain = []
        for finding in findings:
            if finding.kind in (*OF_STATE, "mean", "sum"):
                certain.append(finding)
            elif finding.kind in UNTESTED:
                self._tell(f"{finding.advice.partition(', so wholebatch')[0]}")
            else:
                begin = "the micro-batches may not add up to the batch"
                warn_user(
                    f"{begin}, if their rows are samples. {finding}. If a micro-batch is one "
                    f"sample (a graph, a document), nothing is wrong; {silenced(begin)}"
                )
        return certain

    def _runs(self, run: Callable[[Any], Any], micro: Any, *, is_loss: bool) -> bool:
        """True if a micro-batch runs, and returns what it must; if not, the step will raise."""
        try:
            generators = own_generators(self._model, run)
            with torch.no_grad(), ForwardState(self._model, generators=generators):
                result = run(micro)
                if is_loss:
                    as_loss(result)
        except Exception:
            return False
        return True

    def _all(self, is_true: bool) -> bool:
        """True if this is so on every rank: a loss may meet the other ranks."""
        return self._group.sum([float(is_true)])[0] == self._group.ranks

    def _end(self, findings: Findings, conclusive: bool) -> None:
        """Refuse what any rank has found; test again if the test told nothing on one of them."""
        sums = self._group.sum([float(len(findings)), float(conclusive)])
        self._tries = 0 if sums[1] == self._group.ranks else max(0, self._tries - 1)
        # A loop's first micro-batch may have no units: on one rank, the next one is tested.
        is_alone = self._group.ranks == 1 and not self._shares_forwards
        self.is_due = is_alone and self._tries > 0
        refuse(findings, self._off, on_another_rank=sums[0] > 0)

    def _tell(self, why: str) -> None:
        """Say once that the loss was not tested: a test that told nothing is made again."""
        _log.log(logging.DEBUG if self._has_told else logging.WARNING, _NOT_TESTED, why)
        self._has_told = True


def _layout_of(batch: Any, layout: Mapping[str, Any] | None) -> Layout | None:
    return readable_layout(batch, **(layout or {"batch_size": None, "static": ()}))
