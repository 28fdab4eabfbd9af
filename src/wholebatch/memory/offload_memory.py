"""The allocations of a window whose gradients leave the device (see `wholebatch.offload`).

A prediction has no data to send to the host. Gradients that leave are dropped in the same hooks,
and those that come back for the optimizer's step are allocated again, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from wholebatch.errors import OptionError
from wholebatch.offload.device_to_host import ring_bytes
from wholebatch.offload.host_sums import bucket_bytes
from wholebatch.offload.partial_steps import only

__all__ = ["Elsewhere", "bucket_bytes_of", "check_gradients", "held_on_device"]

_BUCKET_BYTES = {
    "host": 64 * 2**20,
    "swap": 64 * 2**20,
    "moments": 64 * 2**20,
    "release": 32 * 2**20,
}


def check_gradients(gradients: str) -> None:
    if gradients not in ("device", *_BUCKET_BYTES):
        allowed = ", ".join(map(repr, ("device", *_BUCKET_BYTES)))
        raise OptionError(f"gradients={gradients!r}: must be one of {allowed}")


def bucket_bytes_of(gradients: str) -> int:
    """Return the bytes of gradients that are on the device at a time; 0 means all of them."""
    return _BUCKET_BYTES.get(gradients, 0)


def held_on_device(gradients: str, model: nn.Module, device: torch.device) -> int:
    """Return the bytes that a way to keep gradients holds on the device all the time."""
    if gradients != "host" or device.type != "cuda":
        return 0
    return ring_bytes(sum(4 * p.numel() for p in model.parameters() if p.requires_grad))


class Elsewhere:
    """The hooks and the optimizer step of a window whose gradients leave the device."""

    def __init__(
        self,
        gradients: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        around_update: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._around_update = around_update
        self._gradients = gradients
        self._optimizer = optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._most = bucket_bytes(self._parameters, _BUCKET_BYTES[gradients])
        self._ready: list[nn.Parameter] = []
        self._bytes = 0

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Install the hooks around one backward; after the `last` one, gradients are final."""
        made = self._release if self._gradients == "release" else _leave
        if self._gradients == "release" and not last:
            yield
            return
        handles = [p.register_post_accumulate_grad_hook(made) for p in self._parameters]
        try:
            yield
            self._flush()
        finally:
            for handle in handles:
                handle.remove()

    def _release(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._ready.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes > self._most:
            self._flush()

    def _flush(self) -> None:
        ready, self._ready, self._bytes = self._ready, [], 0
        kept = [parameter.grad_dtype for parameter in ready]
        for parameter in ready:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype is not parameter.dtype:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)
            del gradient
        if ready and self._optimizer is not None:
            with self._around_update(), only(self._optimizer, ready):
                self._optimizer.step()
        for parameter, dtype in zip(ready, kept, strict=True):
            parameter.grad = None
            parameter.grad_dtype = dtype

    def step(self) -> None:
        """Step all parameters in buckets, with the gradients of one bucket at a time."""
        if self._optimizer is None or self._gradients == "release":
            return
        for bucket in _buckets(self._parameters, self._most):
            kept = [parameter.grad_dtype for parameter in bucket]
            for parameter in bucket:
                parameter.grad_dtype = parameter.dtype  # Sums are rounded to it before the step.
                parameter.grad = torch.empty_like(parameter)
            with only(self._optimizer, bucket):
                self._optimizer.step()
            for parameter, dtype in zip(bucket, kept, strict=True):
                parameter.grad = None
                parameter.grad_dtype = dtype


def _leave(parameter: Tensor) -> None:
    parameter.grad = None


def _buckets(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not buckets or filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return buckets
