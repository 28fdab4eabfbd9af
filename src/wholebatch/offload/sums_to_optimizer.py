"""How the sums meet the optimizer: they come back to the device, or the parameters to the host.

Two buckets at most are under way: while the optimizer steps on one, the next one travels. The
memory for them is taken at the close, where the activations have left room, and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.offload.host_sums import Bucket, Sums, flat_of, like

__all__ = ["HostStep", "Returns"]

_Buckets: TypeAlias = Sequence[tuple[Bucket, list[nn.Parameter]]]


@dataclass(eq=False, slots=True)
class _OnItsWay:
    """Gradients of a bucket, and the event after which they are there.

    What was rounded is kept until then: its memory must not be used for something else before.
    """

    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    arrived: torch.cuda.Event | None
    rounded: Tensor | None


class Returns:
    """The sums come back: within an iteration the parameters of a bucket have their gradients.

    What is to be rounded to 16 bit is multiplied by `factor` first, and then rounded, once. Sums
    that have `stayed` on the device are taken from there.
    """

    def __init__(
        self,
        rounds: Callable[[nn.Parameter], bool],
        factor: float,
        stayed: dict[int, Tensor] | None = None,
    ) -> None:
        self._rounds = rounds
        self._factor = factor
        self._stayed = {} if stayed is None else stayed
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
    ) -> Iterator[list[nn.Parameter]]:
        """The parameters of one bucket after the other, each with its `.grad`."""
        ahead: list[_OnItsWay] = []
        used = [(bucket, parameters) for bucket, parameters in buckets if parameters]
        try:
            for index in range(len(used) + 1):
                if index < len(used):
                    ahead.append(self._sent(*used[index], sums))
                if index == 0:
                    continue
                here = ahead.pop(0)
                parameters = here.parameters
                if here.arrived is not None:
                    torch.cuda.current_stream(parameters[0].device).wait_event(here.arrived)
                for parameter, gradient in zip(parameters, here.gradients, strict=True):
                    if parameter.grad_dtype is not gradient.dtype:
                        parameter.grad_dtype = gradient.dtype
                    parameter.grad = gradient
                del here, gradient
                yield parameters
                for parameter in parameters:
                    parameter.grad = None
        finally:
            for stream in self._streams.values():
                stream.synchronize()  # the sums may be overwritten from here on

    def _sent(self, bucket: Bucket, parameters: list[nn.Parameter], sums: Sums) -> _OnItsWay:
        """Start the way back of a bucket, but for what has stayed.

        All of it in one piece where the whole bucket comes back, as it nearly always does.
        """
        narrow = parameters[0].dtype if self._rounds(parameters[0]) else None
        flats = {id(p): self._stayed.pop(id(p)) for p in parameters if id(p) in self._stayed}
        if narrow is not None:
            for key, flat in flats.items():
                flats[key] = flat.mul_(self._factor).to(narrow)
        coming = [p for p in parameters if id(p) not in flats]
        wide = arrived = None
        if coming:
            held = [sums.flat(parameter) for parameter in coming]
            rows = [bucket.flat] if len(coming) == len(bucket.parameters) else held
            whole, arrived, wide = self._fetched(rows, coming[0].device, narrow)
            sizes = [one.numel() for one in held]
            flats.update(zip(map(id, coming), whole.split(sizes), strict=True))
        gradients = [like(parameter, flats[id(parameter)]) for parameter in parameters]
        return _OnItsWay(parameters, gradients, arrived, wide)

    def _fetched(
        self, rows: list[Tensor], device: torch.device, narrow: torch.dtype | None
    ) -> tuple[Tensor, torch.cuda.Event | None, Tensor | None]:
        """These sums as one row on the device, when it is there, and what it was rounded from."""
        if device.type != "cuda":
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            return (whole if narrow is None else whole.mul(self._factor).to(narrow)), None, None
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        sizes = [row.numel() for row in rows]
        whole = torch.empty(sum(sizes), dtype=rows[0].dtype, device=device)
        small = None if narrow is None else torch.empty_like(whole, dtype=narrow)
        side.wait_stream(current)  # what the memory was used for before must be over
        with torch.cuda.stream(side), torch.no_grad():
            for target, row in zip(whole.split(sizes), rows, strict=True):
                target.copy_(row, non_blocking=True)
            if small is not None:
                small.copy_(whole.mul_(self._factor))
            arrived = side.record_event()
        return (whole, arrived, None) if small is None else (small, arrived, whole)


class HostStep:
    """The parameters come to the host, are stepped there, and go back; the state stays there."""

    def __init__(self, rounds: Callable[[nn.Parameter], bool]) -> None:
        self._rounds = rounds
        self._on_device: dict[int, Tensor] = {}

    @torch.no_grad()
    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
    ) -> Iterator[list[nn.Parameter]]:
        """The parameters of one bucket after the other, on the host with their `.grad`."""
        used = [parameters for _, parameters in buckets if parameters]
        ahead = _fetched(used[0]) if used else None
        for index, parameters in enumerate(used):
            assert ahead is not None
            copies, arrived = ahead
            ahead = _fetched(used[index + 1]) if index + 1 < len(used) else None
            if arrived is not None:
                arrived.synchronize()
            for parameter, copy in zip(parameters, copies, strict=True):
                _state_to_host(optimizer, parameter)
                gradient = sums.flat(parameter)
                if self._rounds(parameter):
                    gradient = gradient.to(parameter.dtype)
                if copy is not None:
                    self._on_device[id(parameter)] = parameter.data
                    parameter.data = like(parameter, copy)
                if parameter.grad_dtype is not gradient.dtype:
                    parameter.grad_dtype = gradient.dtype
                parameter.grad = like(parameter, gradient)
            try:
                yield parameters
            finally:
                self._give_back(parameters)

    def _give_back(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
            on_device = self._on_device.pop(id(parameter), None)
            if on_device is not None:
                stepped, parameter.data = parameter.data, on_device
                parameter.data.copy_(stepped, non_blocking=True)


def _state_to_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """State that is on the device (from a checkpoint, or from steps made there) moves for good."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            state[name] = value.cpu()


def _fetched(
    parameters: list[nn.Parameter],
) -> tuple[list[Tensor | None], torch.cuda.Event | None]:
    """Start to copy parameters to the host; None for one that is there already."""
    device = parameters[0].device
    if device.type != "cuda":
        return [None] * len(parameters), None
    copies: list[Tensor | None] = []
    for parameter in parameters:
        copy = torch.empty(parameter.numel(), dtype=parameter.dtype, pin_memory=True)
        copies.append(copy.copy_(flat_of(parameter.data, parameter), non_blocking=True))
    return copies, torch.cuda.current_stream(device).record_event()
