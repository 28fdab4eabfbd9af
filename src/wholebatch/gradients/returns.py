"""How the sums meet the optimizer: they come back to the device, or the parameters to the host.

Two buckets at most are under way: while the optimizer steps on one, the next one travels. The
memory for them is taken at the close, where the activations have left room, and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.gradients.sums import Bucket, Sums, flat_of, like

__all__ = ["HostStep", "Returns"]

_Buckets: TypeAlias = Sequence[tuple[Bucket, list[nn.Parameter]]]


class Returns:
    """The sums come back: within an iteration the parameters of a bucket have their gradients."""

    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
        rounds: Callable[[nn.Parameter], bool],
    ) -> Iterator[list[nn.Parameter]]:
        """The parameters of one bucket after the other, each with its `.grad`."""
        ahead: list[tuple[list[nn.Parameter], list[Tensor], torch.cuda.Event | None]] = []
        streams: dict[torch.device, torch.cuda.Stream] = {}
        used = [(bucket, parameters) for bucket, parameters in buckets if parameters]
        try:
            for index in range(len(used) + 1):
                if index < len(used):
                    ahead.append(_sent(*used[index], sums, rounds, streams))
                if index == 0:
                    continue
                parameters, gradients, arrived = ahead.pop(0)
                if arrived is not None:
                    torch.cuda.current_stream(parameters[0].device).wait_event(arrived)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient.dtype is not parameter.dtype:
                        parameter.grad_dtype = gradient.dtype
                    parameter.grad = gradient
                del gradients
                yield parameters
                for parameter in parameters:
                    parameter.grad = None
        finally:
            for stream in streams.values():
                stream.synchronize()  # the sums may be overwritten from here on


def _sent(
    bucket: Bucket,
    parameters: list[nn.Parameter],
    sums: Sums,
    rounds: Callable[[nn.Parameter], bool],
    streams: dict[torch.device, torch.cuda.Stream],
) -> tuple[list[nn.Parameter], list[Tensor], torch.cuda.Event | None]:
    """Start the way back of a bucket; its gradients, and the event after which they are there."""
    device = parameters[0].device
    held = [sums.flat(parameter) for parameter in parameters]
    # Rounded on the host, a 16-bit gradient takes half the bytes of the link and of the device.
    dtype = parameters[0].dtype if rounds(parameters[0]) else bucket.flat.dtype
    if device.type != "cuda":
        pairs = zip(parameters, held, strict=True)
        return parameters, [like(parameter, one.to(dtype)) for parameter, one in pairs], None
    current = torch.cuda.current_stream(device)
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    side = streams[device]
    flats = [torch.empty(one.numel(), dtype=dtype, device=device) for one in held]
    side.wait_stream(current)  # what the memory was used for before must be over
    with torch.cuda.stream(side), torch.no_grad():
        for flat, one in zip(flats, held, strict=True):
            if one.dtype is dtype:
                flat.copy_(one, non_blocking=True)
            else:
                narrow = torch.empty(one.numel(), dtype=dtype, pin_memory=True)
                flat.copy_(narrow.copy_(one), non_blocking=True)
        arrived = side.record_event()
    return parameters, [like(p, flat) for p, flat in zip(parameters, flats, strict=True)], arrived


class HostStep:
    """The parameters come to the host, are stepped there, and go back; the state stays there."""

    def __init__(self) -> None:
        self._on_device: dict[int, Tensor] = {}

    @torch.no_grad()
    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
        rounds: Callable[[nn.Parameter], bool],
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
                if rounds(parameter):
                    gradient = gradient.to(parameter.dtype)
                if copy is not None:
                    self._on_device[id(parameter)] = parameter.data
                    parameter.data = like(parameter, copy)
                if gradient.dtype is not parameter.dtype:
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
