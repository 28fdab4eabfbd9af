"""One reduction of all gradients per window, in buckets, while the last backward still runs.

DDP's own reducer must see every parameter in its one reducing backward, has buckets that change
after the first, and waits for ranks that have no backward to make. Here the layout is fixed (the
same bits after a restart), buckets go out in one fixed order on every rank, and what the last
backward did not touch is sent when it is over: gradients from earlier micro-batches, or zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Buckets"]

_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    dtype: torch.dtype
    missing: int = 0
    flat: Tensor | None = None
    work: Any = None


class Buckets:
    """The gradients of some parameters, summed over the ranks of a group.

    `send` may stand for the collective, where only the memory of it is asked for.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        wait: Callable[[Any], None],
        *,
        send: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._wait = wait
        self._send = send or (lambda flat: dist.all_reduce(flat, group=group, async_op=True))
        self._buckets = _layout(parameters)
        self._next = 0
        self.filled_in: set[int] = set()
        """Parameters, by id, that had no gradient here at the last reduction."""

    @contextmanager
    def reducing(self, *, overlap: bool) -> Iterator[None]:
        """Within it a backward runs; afterwards every gradient is the sum over the ranks."""
        self._next = 0
        self.filled_in = set()
        handles = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            if overlap:
                for parameter in bucket.parameters:
                    handles.append(
                        parameter.register_post_accumulate_grad_hook(self._ready_in(bucket))
                    )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            self._receive(bucket)

    def _ready_in(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            bucket.missing -= 1
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._send_next()

        return ready

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.flat = torch.cat(
            [
                torch.zeros(p.numel(), dtype=bucket.dtype, device=p.device)
                if p.grad is None
                else p.grad.reshape(-1)
                for p in bucket.parameters
            ]
        )
        sent = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        bucket.work = self._send(sent)

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.flat is not None
        self._wait(bucket.work)
        sizes = [parameter.numel() for parameter in bucket.parameters]
        for parameter, piece in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = piece.view_as(parameter).clone()
                self.filled_in.add(id(parameter))
            else:
                parameter.grad.copy_(piece.view_as(parameter))
        bucket.flat = bucket.work = None


def _layout(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Last parameters first, as backward reaches them; one dtype and device to a bucket."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for parameter in reversed(parameters):
        dtype = parameter.grad_dtype or parameter.dtype
        key = (dtype, parameter.device)
        size = parameter.numel() * dtype.itemsize
        bucket, filled = filling.get(key, (None, 0))
        if bucket is None or filled + size > _BUCKET_BYTES:
            bucket, filled = _Bucket([], dtype), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        filling[key] = (bucket, filled + size)
    return buckets
