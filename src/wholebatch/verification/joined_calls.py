"""The undivided batch of a live loop: the inputs of its model's calls, joined and run once.

The loss of the loop is not known as a function. What is known is the gradient of every output, as
the loop's own backwards brought it. Scaled to the right weights and joined, they are the gradient
of the undivided loss by the joined outputs, unless the model lets samples act on each other. Then
the joined outputs differ from those that were seen, and that is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import tensors_of
from wholebatch.coupled.loss_graph import loss_terms
from wholebatch.verification.loss_weights import TermWeights, Unreadable, read_weights
from wholebatch.verification.mistakes import apart
from wholebatch.verification.model_runs import joined
from wholebatch.verification.window_recorder import (
    Call,
    RecordedWindow,
    WindowRecorder,
    first_numbers,
)
from wholebatch.window.forward_state import ForwardState


def _rows(call: Call) -> int:
    """Return how many samples a call was given: the length of its first list or tensor."""
    given = [*call.args, *call.kwargs.values()]
    lists = [len(value) for value in given if isinstance(value, list)]
    return next(iter([*lists, *(len(t) for t in tensors_of(given) if t.dim())]), 0)


@dataclass
class JoinedCalls:
    """Runs the calls of a window as one; `coupled` if an output depends on its batch."""

    window: RecordedWindow
    observer: WindowRecorder
    read: Sequence[TermWeights]
    notes: list[str] = field(default_factory=list)
    coupled: bool = False
    own_loss: bool = False
    """True if the model itself computes the loss, so that of the undivided batch is known."""

    def gradient(self, weights: Sequence[float], shares: Sequence[float]) -> Tensor | None:
        """Return the gradient of the undivided batch as gradients are kept; None if it was not run.

        The micro-batches came with `weights`; right are `shares`.
        """
        micros = self.window.micros
        calls = [micro.calls[0] for micro in micros if len(micro.calls) == 1]
        alike = all(call.module is calls[0].module and not call.is_borrowed for call in calls)
        if len(calls) < len(micros) or not alike:
            return None
        if any(call.draws for call in calls):
            self.notes.append(
                "the forward draws random numbers, so the undivided batch would draw others: it "
                "was not run, and the samples are judged as they were drawn"
            )
            return None
        try:
            return self._run(calls, weights, shares)
        except torch.OutOfMemoryError:
            self.notes.append("the undivided batch does not fit in memory: it was not run")
        except Exception as error:  # what a model says to a batch that it is not made for
            kind = type(error).__name__
            self.notes.append(f"the undivided batch was not run: {kind}: {str(error)[:80]}")
        return None

    def _run(
        self, calls: list[Call], weights: Sequence[float], shares: Sequence[float]
    ) -> Tensor | None:
        inputs = [(tuple(call.args), call.kwargs) for call in calls]
        rows = [_rows(call) for call in calls]
        given = joined(inputs, rows) if all(rows) else None
        if given is None or any(tensor.requires_grad for tensor in tensors_of(given)):
            return None
        module: Any = calls[0].module
        ddp = nn.parallel.DistributedDataParallel
        while isinstance(module, ddp) or type(module).__module__.startswith("deepspeed."):
            module = module.module
        state = ForwardState(module)
        kind = self.observer.parameters[0].device.type
        dtype = next(iter(self.window.autocast), None)
        try:
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                outputs = tensors_of(module(*given[0], **given[1]))
            self._compare(outputs, calls)
            seeds = self._seeds(outputs, calls, weights, shares)
            if not seeds:
                return None
            trained = [p for p in self.observer.parameters if p.requires_grad]
            made = torch.autograd.grad(
                [outputs[place] for place in seeds],
                trained,
                list(seeds.values()),
                allow_unused=True,
            )
        finally:
            state.restore()
        by_parameter = dict(zip(trained, made, strict=True))
        return self.observer.row_of([by_parameter.get(p) for p in self.observer.parameters])

    def _compare(self, outputs: Sequence[Tensor], calls: Sequence[Call]) -> None:
        """Note if a sample's output depends on the batch that it is in."""
        limit = math.sqrt(2.0**-9 if self.window.autocast else self.window.unit)
        for place, tensor in enumerate(outputs):
            rows = [call.rows[place] for call in calls if place in call.rows]
            if len(rows) != len(calls) or not tensor.dim():
                continue
            alone, together = torch.cat(rows), first_numbers(tensor)
            if alone.shape == together.shape:
                pair = (one.double().cpu().flatten() for one in (together, alone))
                self.coupled |= apart(*pair) > limit

    def _seeds(
        self,
        outputs: Sequence[Tensor],
        calls: Sequence[Call],
        weights: Sequence[float],
        shares: Sequence[float],
    ) -> dict[int, Tensor]:
        """Return the gradients of the joined outputs, by place; {} if they are not known."""
        seeds: dict[int, Tensor] = {}
        factors = [s / w if w else 0.0 for s, w in zip(shares, weights, strict=True)]
        for place in sorted({place for call in calls for place in call.slopes}):
            tensor = outputs[place]
            if any(place not in call.slopes for call in calls):
                return {}
            if not tensor.dim():  # a loss that the model itself computes
                if any(t.kind == "regulariser" for m in self.window.micros for t in m.terms):
                    return {}  # the loop adds a penalty to it
                read = read_weights([list(loss_terms(tensor.grad_fn))])
                if isinstance(read, Unreadable) or len(read) != 1 or len(self.read) != 1:
                    return {}
                own, self.own_loss = read[0].weights[0] * read[0].scale, True
                # Nothing else counts: other outputs are what it is made of.
                return {place: torch.full_like(tensor, self.read[0].scale * sum(shares) / own)}
            pairs = zip(calls, factors, strict=True)
            seeds[place] = torch.cat([call.slopes[place] * factor for call, factor in pairs])
            if seeds[place].shape != tensor.shape:
                return {}
        return seeds
